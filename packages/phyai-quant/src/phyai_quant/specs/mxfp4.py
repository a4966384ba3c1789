"""MXFP4 weights: E2M1 codes and power-of-two scales of 32 elements."""

from typing import cast

import torch
from torch import nn

from phyai_quant.scheme import QDType, QuantConfigError, QuantScheme, TensorQuant
from phyai_quant.specs import _activations, _fp4, _scales, base, loading
from phyai_quant.specs.quantized_input import QuantizedInput

BLOCK = 32
"""Elements along K that share a scale."""
STORES = "mxfp4 (none, mxfp4 or fp8)"


class Mxfp4Spec(QuantizedInput):
    """MXFP4 weight ``[N, K]``: ``code * 2^(scale - 127)``.

    On the layer: ``weight`` uint8 ``[N, K/2]``, even k in the low nibble; ``weight_scale`` e8m0
    ``[N, K/32]``, NaN until it is loaded; ``input_scale`` fp32 ``[1]`` for a static fp8 input.

    Args:
        weight: Quantization of the weight: mxfp4 in blocks of ``(1, 32)``.
        activation: Quantization of the input: None, mxfp4, or fp8.

    Raises:
        QuantConfigError: This format does not store the scheme.
    """

    spec_id = "mxfp4_block_32_linear"
    weight_dtype: torch.dtype | None = torch.uint8

    def __init__(self, weight: TensorQuant, activation: TensorQuant | None = None) -> None:
        reason = _unsupported(weight, activation)
        if reason:
            raise QuantConfigError(f"mxfp4 weights cannot be stored this way: {reason}")
        self.weight = weight
        self.activation = activation
        self.physical_signature: base.PhysicalSignature = base.PhysicalSignature(
            format="mxfp4",
            layout="linear",
            block_shape=(1, BLOCK),
            scale_dtype="fp8_e8m0",
            granularity="block",
            storage_dtype="uint8",
            fields=_activations.signature_fields(activation),
        )

    def tensor_names(self) -> tuple[str, ...]:
        """Returns the accepted tensors: both names of the codes, their scale, a static scale."""
        names = (*_fp4.CODE_NAMES, "weight_scale")
        return (*names, *self.static_names)

    def allocate(self, layer: nn.Module, request: base.AllocationRequest) -> None:
        """Registers codes and scales.

        Raises:
            QuantConfigError: K is no multiple of 32, or a slice cuts a block of 32.
        """
        loading.attach_state(layer, request, ("weight", "weight_scale", *self.static_names))
        _fp4.allocate(layer, request, BLOCK, torch.float8_e8m0fnu)
        if self.static_input:
            _scales.register_nan(layer, "input_scale", (1,), request.device)

    def load_weight(
        self, layer: nn.Module, name: str, loaded: torch.Tensor, shard_id: base.ShardId = None
    ) -> None:
        """Copies this rank's part of codes uint8 ``[w, K/2]`` or scales e8m0, uint8 ``[w, K/32]``.

        Raises:
            QuantConfigError: Wrong tensor name, leg, shape or dtype; a tensor given twice.
        """
        loading.check_tensor_name(layer, name, self.tensor_names())
        legs = loading.legs_of(layer, shard_id)
        if name in _fp4.CODE_NAMES:
            _fp4.load_codes(layer, name, loaded, legs)
        elif name == "weight_scale":
            _fp4.load_block_scales(layer, name, loaded, legs, BLOCK)
        else:
            _scales.load_input_scale(layer, name, _scales.float_scale(layer, name, loaded))
            loading.load_state(layer).loaded.update((name, leg) for leg in legs)

    def process_after_loading(self, layer: nn.Module) -> None:
        """Checks that everything has arrived.

        Raises:
            QuantConfigError: A leg of the weight or a scale was never loaded.
        """
        loading.check_complete(layer)
        loading.load_state(layer).finished = True

    def dequantize_weight(self, layer: nn.Module) -> torch.Tensor:
        """Returns the weight ``[N, K]`` in fp32; rows that were never loaded are NaN."""
        codes = cast("nn.Parameter", layer.weight).detach()
        scale = cast("nn.Parameter", layer.weight_scale).detach()
        return _fp4.dequantize(codes, scale.float(), BLOCK)


def _unsupported(weight: TensorQuant, act: TensorQuant | None) -> str:
    if weight.dtype is not QDType.MXFP4 or weight.block_shape != (1, BLOCK):
        return f"weight is {weight.describe()}; allowed: mxfp4 with block_shape (1, {BLOCK})"
    plain = weight.symmetric and weight.micro_scaled and not weight.act_order
    if not plain or weight.dynamic:
        return f"weight is {weight.describe()}; allowed: symmetric, micro-scaled, stored scales"
    if act is None:
        return ""
    if act.dtype is QDType.NVFP4:
        return f"input is {act.describe()}; allowed: none, mxfp4 or fp8"
    return _activations.unsupported(act)


def build(scheme: QuantScheme | None, _sm: int | None = None) -> Mxfp4Spec | None:
    """Returns the spec of mxfp4 weights on disk, else None."""
    if scheme is None or scheme.online or _unsupported(scheme.weight, scheme.input):
        return None
    return Mxfp4Spec(scheme.weight, scheme.input)
