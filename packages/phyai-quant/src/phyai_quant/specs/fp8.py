"""FP8 weights that are quantized on disk, with their scales and activation quantization."""

from typing import cast

import torch
from torch import nn

from phyai_quant.scheme import Granularity, QDType, QuantConfigError, QuantScheme, TensorQuant
from phyai_quant.specs import _activations, _scales, base, fp8_scales, loading
from phyai_quant.specs.quantized_input import QuantizedInput
from phyai_quant.specs.slicing import local_parts

_MX_BLOCK = (1, 32)
STORES = "fp8_e4m3 and fp8_e5m2 (per_tensor, per_channel, block; none or fp8)"


class Fp8Spec(QuantizedInput):
    """float8 e4m3fn or e5m2 weight ``[N, K]`` with multipliers in fp32 or, micro-scaled, e8m0.

    ``weight_scale`` on the layer is ``[N]`` for per_tensor (the scalar of each leg repeated over
    its rows after loading) and per_channel, ``[ceil(N/bn), ceil(K/bk)]`` for block. Micro-scaled
    weights (MXFP8) have blocks of 32 along K. A static input adds ``input_scale`` ``[1]``, the
    largest over the legs. Scales are NaN until they are loaded.

    Args:
        weight: Quantization of the weight.
        activation: Quantization of the input; None keeps the activation unquantized.

    Raises:
        QuantConfigError: This format does not store the scheme.
    """

    def __init__(self, weight: TensorQuant, activation: TensorQuant | None = None) -> None:
        reason = _unsupported(weight, activation)
        if reason:
            raise QuantConfigError(f"fp8 weights cannot be stored this way: {reason}")
        self.weight = weight
        self.activation = activation
        self.weight_dtype: torch.dtype | None = _activations.FLOAT8_DTYPES[weight.dtype]
        family = {QDType.FP8_E4M3: "fp8", QDType.FP8_E5M2: "fp8_e5m2"}[weight.dtype]
        family = "mx" + family if weight.micro_scaled else family
        self.spec_id: str = f"{family}_{weight.granularity.value}"
        if weight.block_shape is not None:
            self.spec_id += f"_{weight.block_shape[0]}_{weight.block_shape[1]}"
        self.physical_signature: base.PhysicalSignature = base.PhysicalSignature(
            format=weight.dtype.value,
            block_shape=weight.block_shape,
            scale_dtype=base.dtype_name(fp8_scales.scale_dtype(weight)),
            granularity=weight.granularity.value,
            storage_dtype=weight.dtype.value,
            fields=_activations.signature_fields(activation),
        )

    def tensor_names(self) -> tuple[str, ...]:
        """Returns the accepted tensors: the weight, both names of its scale, a static scale."""
        names = ("weight", *fp8_scales.WEIGHT_SCALE_NAMES)
        return (*names, *self.static_names)

    def allocate(self, layer: nn.Module, request: base.AllocationRequest) -> None:
        """Registers ``weight``, ``weight_scale`` and, for a static input, ``input_scale``.

        Raises:
            QuantConfigError: A leg or a slice begins or ends inside a scale block.
        """
        loading.attach_state(layer, request, ("weight", "weight_scale", *self.static_names))
        scale_shape = fp8_scales.allocated_shape(layer, self.weight)
        weight = torch.zeros(request.weight_shape, dtype=self.weight_dtype, device=request.device)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        dtype = fp8_scales.scale_dtype(self.weight)
        _scales.register_nan(layer, "weight_scale", scale_shape, request.device, dtype)
        if self.static_input:
            _scales.register_nan(layer, "input_scale", (1,), request.device)

    def load_weight(
        self, layer: nn.Module, name: str, loaded: torch.Tensor, shard_id: base.ShardId = None
    ) -> None:
        """Copies this rank's part of one leg's weight ``[w, K]`` or scale.

        Raises:
            QuantConfigError: Wrong tensor name, leg, shape or dtype; a scale given twice.
        """
        loading.check_tensor_name(layer, name, self.tensor_names())
        legs = loading.legs_of(layer, shard_id)
        if name == "weight":
            self._load_codes(layer, loaded, legs)
            part = "weight"
        elif name == "input_scale":
            _scales.load_input_scale(layer, name, _scales.float_scale(layer, name, loaded))
            part = "input_scale"
        else:
            fp8_scales.load_weight_scale(layer, name, loaded, legs, self.weight)
            part = "weight_scale"
        loading.load_state(layer).loaded.update((part, leg) for leg in legs)

    def _load_codes(self, layer: nn.Module, loaded: torch.Tensor, legs: range) -> None:
        if loaded.dtype != self.weight_dtype:
            raise QuantConfigError(
                f"{loading.layer_name(layer)}: the quantization config says "
                f"{self.weight.dtype.value} but the "
                f"checkpoint weight is {loaded.dtype}; allowed: {self.weight_dtype}; exclude the "
                "layer in the config if the checkpoint keeps it unquantized"
            )
        with torch.no_grad():
            for rows, part in local_parts(layer, "weight", loaded, legs):
                cast("nn.Parameter", layer.weight)[rows].copy_(part)

    def process_after_loading(self, layer: nn.Module) -> None:
        """Repeats the scalar scale of each leg over its rows (per_tensor).

        Raises:
            QuantConfigError: A leg of the weight or a scale was never loaded.
        """
        loading.check_complete(layer)
        state = loading.load_state(layer)
        if state.finished:
            return
        if self.weight.granularity is Granularity.PER_TENSOR:
            slots = cast("nn.Parameter", layer.weight_scale)
            widths = torch.tensor(state.request.logical_widths, device=slots.device)
            fanned_out = torch.repeat_interleave(slots.detach(), widths)
            layer.register_parameter("weight_scale", nn.Parameter(fanned_out, requires_grad=False))
        state.finished = True

    def dequantize_weight(self, layer: nn.Module) -> torch.Tensor:
        """Returns the weight ``[N, K]`` in fp32: codes times their scales.

        Raises:
            QuantConfigError: `process_after_loading` did not run.
        """
        loading.check_finished(layer)
        codes = cast("nn.Parameter", layer.weight).detach().float()
        scale = cast("nn.Parameter", layer.weight_scale).detach()
        if self.weight.block_shape is None:
            return codes * scale[:, None]
        return codes * fp8_scales.expand_blocks(scale.float(), self.weight.block_shape, codes.shape)


def _unsupported(weight: TensorQuant, act: TensorQuant | None) -> str:
    seen = f"weight is {weight.describe()}; "
    if weight.dtype not in _activations.FLOAT8_DTYPES or not weight.symmetric or weight.dynamic:
        return f"{seen}allowed: symmetric fp8_e4m3 or fp8_e5m2 with stored scales"
    if weight.act_order:
        return f"{seen}allowed: scales in the order of K"
    if weight.micro_scaled and weight.block_shape != _MX_BLOCK:
        return f"{seen}allowed: micro-scaled blocks of {_MX_BLOCK}"
    if act is None:
        return ""
    if act.dtype not in _activations.FLOAT8_DTYPES:
        return f"input is {act.describe()}; allowed: none, fp8_e4m3 or fp8_e5m2"
    return _activations.unsupported(act)


def build(scheme: QuantScheme | None, _sm: int | None = None) -> Fp8Spec | None:
    """Returns the spec of a scheme that is fp8 on disk, else None."""
    if scheme is None or scheme.online or _unsupported(scheme.weight, scheme.input):
        return None
    return Fp8Spec(scheme.weight, scheme.input)
