"""What integer weights share: loading, scales, activations; subclasses store the codes."""

from abc import ABC, abstractmethod

import torch
from torch import nn

from phyai_quant.scheme import QDType, QuantConfigError, TensorQuant
from phyai_quant.specs import base, int_activations, int_codes, int_scales, loading
from phyai_quant.specs.bf16 import check_params_dtype
from phyai_quant.specs.quantized_input import QuantizedInput

CODE_NAMES = ("weight", "weight_packed")
"""Checkpoint names of the codes: int8 ``[N, K]``, or int32 words packed along K."""


class IntegerSpec(QuantizedInput, ABC):
    """Integer codes with fp32 scales and, when asymmetric, zero points.

    A value is ``(code - zero point) * scale``; `int_scales.allocate` gives the shapes of the
    parameters. Checkpoints of both forms load: codes as int8 ``weight`` or as int32
    ``weight_packed``, zero points as int8 or as int32 packed along N.

    Args:
        weight: Quantization of the weight.
        activation: Quantization of the input; None keeps the activation unquantized.

    Raises:
        QuantConfigError: This format does not store the scheme.
    """

    weight_dtype: torch.dtype | None
    layout: str | None
    code_name: str

    def __init__(self, weight: TensorQuant, activation: TensorQuant | None = None) -> None:
        reason = unsupported(weight, activation)
        if reason:
            raise QuantConfigError(f"integer weights cannot be stored this way: {reason}")
        self.weight = weight
        self.activation = activation
        self.bits: int = int_codes.BITS[weight.dtype]
        self.spec_id: str = _spec_id(weight, activation, self.layout)
        self.physical_signature: base.PhysicalSignature = base.PhysicalSignature(
            format=weight.dtype.value,
            layout=self.layout,
            block_shape=weight.block_shape,
            scale_dtype="fp32",
            granularity=weight.granularity.value,
            storage_dtype=base.dtype_name(self.weight_dtype),
            fields=_signature_fields(weight, activation),
        )

    def tensor_names(self) -> tuple[str, ...]:
        """Returns the accepted tensors: both names of the codes, scale, zero point, the rest."""
        names = (*CODE_NAMES, "weight_shape", "weight_scale", "weight_zero_point")
        order = ("weight_g_idx",) if self.weight.act_order else ()
        return (*names, *order, *(("input_scale", "input_zero_point") if self.static_input else ()))

    def allocate(self, layer: nn.Module, request: base.AllocationRequest) -> None:
        """Registers ``weight`` and its scales; scales are NaN until they are loaded.

        Raises:
            QuantConfigError: ``params_dtype`` is not fp32, fp16 or bf16; K is not a multiple of
                the group size; legs or slices do not fit the groups; K is sliced although the
                groups follow an activation order.
        """
        check_params_dtype(layer, request.params_dtype)
        loading.attach_state(layer, request, self._parts())
        int_scales.allocate(layer, self.weight)
        if self.activation is not None and self.static_input:
            int_activations.allocate(layer, self.activation)
        weight = torch.zeros(
            self._stored_shape(request.weight_shape), dtype=self.weight_dtype, device=request.device
        )
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def load_weight(
        self, layer: nn.Module, name: str, loaded: torch.Tensor, shard_id: base.ShardId = None
    ) -> None:
        """Copies one leg's codes, scale, zero point or group order.

        Raises:
            QuantConfigError: Wrong tensor name, leg, shape, dtype or value; codes given under two
                names; a layer that is finished.
        """
        loading.check_tensor_name(layer, name, self.tensor_names())
        legs = loading.legs_of(layer, shard_id)
        state = loading.load_state(layer)
        if state.finished:
            raise QuantConfigError(
                f"{loading.layer_name(layer)}: {name!r} arrived after process_after_loading; "
                "allocate the weight again to load another one"
            )
        part = name
        if name in CODE_NAMES:
            self._load_codes(layer, name, loaded, legs)
            part = self.code_name
        elif name == "weight_shape":
            _check_weight_shape(layer, loaded, legs)
        elif name == "weight_scale":
            int_scales.load_scale(layer, loaded, legs, self.weight)
        elif name == "weight_zero_point":
            int_scales.load_zero_point(layer, loaded, legs, self.weight, self.bits)
        elif name == "weight_g_idx":
            int_scales.load_group_order(layer, loaded, legs, self.weight)
        elif self.activation is not None:
            int_activations.load(layer, name, loaded, legs, self.activation)
        state.loaded.update((loaded_part, leg) for loaded_part in {name, part} for leg in legs)

    def _load_codes(self, layer: nn.Module, name: str, loaded: torch.Tensor, legs: range) -> None:
        other = CODE_NAMES[1 - CODE_NAMES.index(name)]
        loaded_parts = loading.load_state(layer).loaded
        if any((self.code_name, leg) in loaded_parts for leg in legs) and not all(
            (name, leg) in loaded_parts for leg in legs
        ):
            raise QuantConfigError(
                f"{loading.layer_name(layer)}: the weight is loaded twice, now as {name!r} after "
                f"{other!r}; the checkpoint must hold one of them per layer"
            )
        rows, columns = int_codes.whole_shape(layer, legs)
        packed = name == "weight_packed"
        shape = (rows, int_codes.words_for(columns, self.bits) if packed else columns)
        dtypes = (torch.int32,) if packed else (torch.int8,)
        int_codes.check_tensor(layer, name, loaded, dtypes=dtypes, shapes=(shape,))
        with torch.no_grad():
            self._store_codes(layer, name, loaded, legs)

    def process_after_loading(self, layer: nn.Module) -> None:
        """Checks that everything arrived and merges the static input scales of the legs.

        Raises:
            QuantConfigError: A leg of the codes or of a scale was never loaded.
        """
        loading.check_complete(layer)
        state = loading.load_state(layer)
        if state.finished:
            return
        if self.activation is not None and self.static_input:
            int_activations.merge_legs(layer, self.activation)
        state.finished = True

    def dequantize_weight(self, layer: nn.Module) -> torch.Tensor:
        """Returns the weight ``[N, K]`` in fp32: ``(codes - zero point) * scale``.

        Raises:
            QuantConfigError: `process_after_loading` did not run.
        """
        loading.check_finished(layer)
        return int_scales.dequantize(layer, self.signed_codes(layer), self.weight)

    def _quantize_activation(
        self, x: torch.Tensor, layer: nn.Module, activation: TensorQuant
    ) -> base.ActivationView:
        return int_activations.quantize(x, layer, activation)

    def _parts(self) -> tuple[str, ...]:
        required = {
            self.code_name: True,
            "weight_scale": True,
            "weight_zero_point": not self.weight.symmetric,
            "weight_g_idx": self.weight.act_order,
            "input_scale": self.static_input,
            "input_zero_point": self.activation is not None
            and self.static_input
            and not self.activation.symmetric,
        }
        return tuple(name for name, needed in required.items() if needed)

    @abstractmethod
    def signed_codes(self, layer: nn.Module) -> torch.Tensor:
        """Returns the signed int8 codes ``[N, K]``."""

    @abstractmethod
    def _stored_shape(self, weight_shape: tuple[int, int]) -> tuple[int, int]:
        """Returns the shape of ``layer.weight``."""

    @abstractmethod
    def _store_codes(self, layer: nn.Module, name: str, loaded: torch.Tensor, legs: range) -> None:
        """Copies the codes of consecutive legs, of checked dtype and shape, to their place."""


def unsupported(weight: TensorQuant, activation: TensorQuant | None) -> str:
    """Returns why integer weights cannot store a scheme, or an empty text."""
    reason = f"weight is {weight.describe()}; "
    if weight.dtype not in int_codes.BITS or weight.dynamic:
        return reason + f"allowed: {', '.join(int_codes.BITS)} with stored scales"
    if weight.micro_scaled or weight.rotation_group is not None:
        return reason + "allowed: fp32 scales of a weight that is not rotated"
    if weight.act_order and (weight.block_shape is None or weight.block_shape[0] != 1):
        return reason + "an activation order is allowed with block_shape (1, group along K)"
    return "" if activation is None else int_activations.unsupported(activation)


def _check_weight_shape(layer: nn.Module, loaded: torch.Tensor, legs: range) -> None:
    int_codes.check_tensor(
        layer, "weight_shape", loaded, dtypes=(torch.int64, torch.int32), shapes=((2,),)
    )
    expected = list(int_codes.whole_shape(layer, legs))
    if loaded.tolist() != expected:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: 'weight_shape' says {loaded.tolist()}, the layer "
            f"expects {expected}"
        )


def _spec_id(weight: TensorQuant, activation: TensorQuant | None, layout: str | None) -> str:
    words = [weight.dtype.value, *((layout,) if layout else ()), weight.granularity.value]
    if weight.block_shape is not None:
        words += map(str, weight.block_shape)
    flags = {"asymmetric": not weight.symmetric, "actorder": weight.act_order}
    words += [name for name, on in flags.items() if on]
    return "_".join([*words, "a16" if activation is None else activation.dtype.value])


def _signature_fields(
    weight: TensorQuant, activation: TensorQuant | None
) -> tuple[tuple[str, object], ...]:
    fields: dict[str, object] = {
        "activation": "a16" if activation is None else activation.dtype.value,
        "symmetric": weight.symmetric,
        "act_order": weight.act_order,
    }
    if activation is not None:
        fields |= {
            "input_granularity": activation.granularity.value,
            "input_scale": "dynamic" if activation.dynamic else "static",
            "input_symmetric": activation.symmetric,
        }
    return tuple(fields.items())


def stores_as_rows(weight: TensorQuant, activation: TensorQuant | None) -> bool:
    """Tells whether codes are kept as int8 rows; others are kept in words as they are on disk."""
    groups_only = activation is None and weight.block_shape is not None
    return weight.dtype is QDType.INT8 and not groups_only
