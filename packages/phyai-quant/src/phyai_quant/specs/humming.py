"""Weights that Humming's kernels read, quantized while a high-precision checkpoint is loaded."""

from importlib.util import find_spec
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from phyai_quant.online_rules import check_online_scheme
from phyai_quant.scheme import QDType, QuantConfigError, QuantScheme, TensorQuant
from phyai_quant.specs import _packing, _rtn, base, humming_staging, loading
from phyai_quant.specs.bf16 import check_float_source
from phyai_quant.specs.humming_format import (
    HummingFormat,
    check_fits,
    format_of,
    quantize_token_rows,
    why_unusable,
)
from phyai_quant.specs.quantized_input import QuantizedInput


class HummingSpec(QuantizedInput):
    """int4, int8, fp8, nvfp4 or mxfp4 weights that are rounded to nearest at load.

    While loading, ``layer.weight`` is an empty int32 placeholder; every leg is quantized on the
    layer's device as it arrives and its raw codes wait in CPU memory. `process_after_loading` puts
    the tensors on the layer's device: packed for the GPU with ``layer.humming_config``, or raw
    without an NVIDIA GPU, where the same codes and scales give the numbers of the scheme.

    Packed tensors belong to one GPU model and one version of the library, so a packed layer has no
    state dict and cannot be read back.

    Args:
        scheme: A scheme that is quantized at load.
        sm: NVIDIA SM version of the target; None stores raw tensors.

    Raises:
        QuantConfigError: Humming cannot quantize the scheme at load.
    """

    weight_dtype: torch.dtype | None = torch.int32

    def __init__(self, scheme: QuantScheme, sm: int | None = None) -> None:
        check_online_scheme(scheme)
        if not quantizes(scheme):
            raise QuantConfigError(
                f"Humming does not store {scheme.describe()}; allowed: a weight that is quantized "
                "at load and not rotated, with an input of at least 8 bits"
            )
        self.scheme = scheme
        self.packed: bool = sm is not None
        self.stored: HummingFormat = format_of(scheme)
        layout = "humming" if self.packed else "humming_raw"
        self.spec_id: str = self.stored.spec_id(layout)
        self.physical_signature: base.PhysicalSignature = self.stored.signature(layout)
        self.activation: TensorQuant | None = scheme.input

    def tensor_names(self) -> tuple[str, ...]:
        """Returns ``("weight",)``: the high-precision source."""
        return ("weight",)

    def allocate(self, layer: nn.Module, request: base.AllocationRequest) -> None:
        """Registers the placeholder and reserves CPU memory for the raw tensors.

        Raises:
            QuantConfigError: N, K, a leg's width or ``params_dtype`` does not fit the format.
        """
        check_fits(layer, self.stored, request, packed=self.packed)
        loading.attach_state(layer, request, self.tensor_names())
        humming_staging.attach_placeholder(layer, request)
        raw = humming_staging.empty_raw(self.stored, request)
        layer.humming_staging = humming_staging.HummingStaging(raw)  # pyright: ignore[reportArgumentType]

    def load_weight(
        self, layer: nn.Module, name: str, loaded: Tensor, shard_id: base.ShardId = None
    ) -> None:
        """Quantizes a whole leg ``[w, K]`` (fp32, fp16 or bf16) and keeps the layer's part.

        Raises:
            QuantConfigError: Wrong tensor name, leg, shape or source dtype; values that are not
                finite; a leg given twice; a layer that is packed already.
        """
        loading.check_tensor_name(layer, name, self.tensor_names())
        legs = loading.legs_of(layer, shard_id)
        check_float_source(layer, loaded)
        humming_staging.check_new(layer, name, loaded, legs)
        device = humming_staging.placeholder_device(layer)
        with torch.no_grad():
            humming_staging.load_leg(layer, self.stored, loaded, legs, device)
        loading.load_state(layer).loaded.update((name, leg) for leg in legs)

    def process_after_loading(self, layer: nn.Module) -> None:
        """Moves the tensors to the layer's device, packed for its GPU, and frees the staging.

        Raises:
            QuantConfigError: A leg was never loaded; the layer is not on an NVIDIA GPU although
                the target is one; Humming has no kernel for the shape.
        """
        loading.check_complete(layer)
        if loading.load_state(layer).finished:
            return
        raw = cast("humming_staging.HummingStaging", layer.humming_staging).raw
        if self.packed:
            finish_packed(layer, self.stored, raw)
        else:
            device = humming_staging.placeholder_device(layer)
            humming_staging.register_tensors(
                layer, {key: tensor.to(device) for key, tensor in raw.items()}
            )
        del layer.humming_staging
        loading.load_state(layer).finished = True

    def dequantize_weight(self, layer: nn.Module) -> Tensor:
        """Returns the weight ``[N, K]`` in fp32 of raw tensors.

        Raises:
            QuantConfigError: `process_after_loading` did not run, or the tensors are packed.
        """
        loading.check_finished(layer)
        if self.packed:
            refuse_reading(layer)
        return dequantize_raw(layer, self.stored)

    def _quantize_activation(
        self,
        x: Tensor,
        layer: nn.Module,  # noqa: ARG002
        activation: TensorQuant,
    ) -> base.ActivationView:
        return quantize_token_rows(x, activation)


def finish_packed(layer: nn.Module, stored: HummingFormat, raw: dict[str, Tensor]) -> None:
    """Packs raw tensors on the layer's GPU and puts them on the layer."""
    from phyai_quant.specs.humming_pack import pack

    device = humming_staging.placeholder_device(layer)
    config, tensors = pack(layer, stored, raw, device)
    humming_staging.register_tensors(layer, tensors)
    layer.humming_config = config
    layer.register_state_dict_pre_hook(_refuse_state_dict)


def refuse_reading(layer: nn.Module) -> NoReturn:
    """Raises QuantConfigError: packed tensors cannot be read back."""
    raise QuantConfigError(
        f"{loading.layer_name(layer)}: the weight is packed for one GPU and cannot be read back; "
        "materialize the scheme with sm=None and load it on the CPU to read the same numbers"
    )


def dequantize_raw(layer: nn.Module, stored: HummingFormat) -> Tensor:
    """Returns the weight ``[N, K]`` in fp32 of a layer that holds raw tensors."""
    codes = _packing.unpack_words(cast("nn.Parameter", layer.weight).detach(), stored.bits)
    if stored.weight.dtype in _rtn.INT_BITS:
        codes = _packing.to_signed(codes, stored.bits)
    elif stored.bits == 8:
        codes = codes.view(_rtn.FP8_DTYPES[stored.weight.dtype])
    second = getattr(layer, "weight_scale_2", None)
    scale = cast("nn.Parameter", layer.weight_scale).detach()
    quantized = _rtn.QuantizedWeight(codes, scale, None if second is None else second.detach())
    return _rtn.dequantize(quantized, stored.weight)


def _refuse_state_dict(layer: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG001
    raise QuantConfigError(
        f"{loading.layer_name(layer)}: the weight is packed for one GPU and one version of "
        "humming-kernels and cannot be saved; save the checkpoint that it was loaded from"
    )


def quantizes(scheme: QuantScheme) -> bool:
    """Tells whether a scheme is Humming's: quantized at load, not rotated, no 4-bit input."""
    four_bit_input = scheme.input is not None and scheme.input.dtype is QDType.NVFP4
    return scheme.online and scheme.weight.rotation_group is None and not four_bit_input


def build(scheme: QuantScheme | None, sm: int | None) -> Any:
    """Returns the spec of a weight that is quantized at load, else None.

    Raises:
        QuantConfigError: The GPU or a missing library keeps Humming from running it.
    """
    if scheme is None or not quantizes(scheme):
        return None
    if sm is not None:
        reason = why_unusable(scheme, sm, installed=find_spec("humming") is not None)
        if reason is not None:
            raise QuantConfigError(f"cannot quantize at load ({scheme.describe()}): {reason}")
    return HummingSpec(scheme, sm)
