"""NVFP4 weights: E2M1 codes, e4m3 scales of 16 or 32 elements, one fp32 scale per leg."""

from typing import cast

import torch
from torch import nn

from phyai_quant.scheme import QDType, QuantConfigError, QuantScheme, TensorQuant
from phyai_quant.specs import (
    _activations,
    _fp4,
    _nvfp4_scales,
    _packing,
    _rtn,
    _scales,
    base,
    loading,
)
from phyai_quant.specs.bf16 import check_float_source
from phyai_quant.specs.quantized_input import QuantizedInput
from phyai_quant.specs.slicing import whole_legs

_BLOCKS = (16, 32)
_BLOCK_GEMM_SM = 100
STORES = "nvfp4 (none, nvfp4 or fp8)"


class Nvfp4Spec(QuantizedInput):
    """NVFP4 weight ``[N, K]``: ``code * (global_scale * block_scale)``.

    On the layer: ``weight`` uint8 ``[N, K/2]``, even k in the low nibble; ``weight_scale`` e4m3
    ``[N, K/block]``, or ``[roundup(N, 128), roundup(K/16, 4)]`` in tiles after loading with layout
    ``128x4``; ``weight_global_scale`` fp32 ``[L]``, a multiplier for each of the L legs;
    ``input_scale`` fp32 ``[1]``, the largest over the legs, for inputs with a stored scale, else
    None. ``weight_global_divisor`` ``[L]`` is there when the checkpoint stores reciprocals.
    Scales are NaN until they are loaded.

    An nvfp4 input has run-time block scales. Its global scale is stored when the scheme is static,
    and may be when it is dynamic; without it every call takes the largest magnitude of its tensor.

    Args:
        weight: Quantization of the weight: nvfp4 in blocks of ``(1, 16)``, or of ``(1, 32)`` with
            an fp8 input.
        activation: Quantization of the input: None, nvfp4, or fp8.
        layout: Layout of the block scales after loading, ``linear`` or ``128x4``.
        online: True when the source is unquantized: each whole leg is then quantized with its own
            global scale, ``max|w| / (448 * 6)``, before it is cut.

    Raises:
        QuantConfigError: This format does not store the scheme.
    """

    weight_dtype: torch.dtype | None = torch.uint8

    def __init__(
        self,
        weight: TensorQuant,
        activation: TensorQuant | None = None,
        *,
        layout: str = "linear",
        online: bool = False,
    ) -> None:
        reason = unsupported(weight, activation)
        if reason:
            raise QuantConfigError(f"nvfp4 weights cannot be stored this way: {reason}")
        self.weight = weight
        self.activation = activation
        self.online = online
        self.block: int = _block(weight)
        self.spec_id: str = f"nvfp4_block_{self.block}_{layout}"
        self.physical_signature: base.PhysicalSignature = base.PhysicalSignature(
            format="nvfp4",
            layout=layout,
            block_shape=(1, self.block),
            scale_dtype="fp8_e4m3",
            granularity="block",
            storage_dtype="uint8",
            fields=(
                ("block_size", self.block),
                ("micro_scaled", True),
                ("global_scale_dtype", "fp32"),
                *_activations.signature_fields(activation),
            ),
        )

    @property
    def _input_names(self) -> tuple[str, ...]:
        if self.activation is None or self.online:
            return ()
        if self.activation.dtype is QDType.NVFP4:
            return _scales.INPUT_NAMES
        return self.static_names

    def tensor_names(self) -> tuple[str, ...]:
        """Returns the accepted tensors: of ModelOpt, of compressed-tensors, of the input."""
        if self.online:
            return ("weight",)
        names = (*_fp4.CODE_NAMES, "weight_scale", *_nvfp4_scales.GLOBAL_NAMES)
        return (*names, *self._input_names)

    def allocate(self, layer: nn.Module, request: base.AllocationRequest) -> None:
        """Registers codes and scales.

        Raises:
            QuantConfigError: K is no multiple of the block, or a slice cuts a block.
        """
        parts = ("weight",)
        if not self.online:
            parts += ("weight_scale", "weight_global_scale")
            parts += self.static_names
        loading.attach_state(layer, request, parts)
        _fp4.allocate(layer, request, self.block, torch.float8_e4m3fn)
        legs = (len(request.logical_widths),)
        _scales.register_nan(layer, "weight_global_scale", legs, request.device)
        if not self.online:
            _scales.register_nan(layer, "weight_global_divisor", legs, request.device)
        if self._input_names:
            _scales.register_nan(layer, "input_scale", (1,), request.device)

    def load_weight(
        self, layer: nn.Module, name: str, loaded: torch.Tensor, shard_id: base.ShardId = None
    ) -> None:
        """Copies this rank's part of a leg's codes or scales, or quantizes an online leg.

        Codes are uint8 ``[w, K/2]``. Block scales are e4m3 (or uint8) ``[w, K/16]``; when the
        scheme says swizzled they come in tiles. Global and input scales are scalars;
        ``*_global_scale`` hold reciprocals. An online source is ``[w, K]`` in fp32, fp16 or bf16.

        Raises:
            QuantConfigError: Wrong tensor name, leg, shape, dtype or value; a tensor given twice.
        """
        loading.check_tensor_name(layer, name, self.tensor_names())
        legs = loading.legs_of(layer, shard_id)
        if self.online:
            self._quantize_legs(layer, name, loaded, legs)
        elif name in _fp4.CODE_NAMES:
            _fp4.load_codes(layer, name, loaded, legs)
        elif name == "weight_scale":
            if self.weight.swizzled_scales:
                loaded = _nvfp4_scales.read_tiles(layer, name, loaded, legs)
            _fp4.load_block_scales(layer, name, loaded, legs, self.block)
        elif name in _nvfp4_scales.GLOBAL_NAMES:
            _nvfp4_scales.load_global(layer, name, loaded, legs)
        else:
            _scales.load_input_part(layer, name, loaded, legs)

    def _quantize_legs(
        self, layer: nn.Module, name: str, loaded: torch.Tensor, legs: range
    ) -> None:
        check_float_source(layer, loaded)
        globals_ = cast("nn.Parameter", layer.weight_global_scale)
        for leg, source in whole_legs(layer, name, loaded, legs):
            try:
                codes, scale, level = self._quantize(source.to(globals_.device))
            except ValueError as error:
                raise QuantConfigError(f"{loading.layer_name(layer)}: {error}") from error
            one = range(leg, leg + 1)
            _fp4.copy_parts(layer, "weight", name, codes, one, 2)
            _fp4.copy_parts(layer, "weight_scale", name, scale, one, self.block)
            with torch.no_grad():
                globals_[leg].copy_(level.reshape(()))

    def _quantize(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns packed codes, block scales and the global scale of a whole leg."""
        quantized = _rtn.quantize(source, self.weight)
        level = cast("torch.Tensor", quantized.global_scale)
        return _packing.pack_nibbles(quantized.codes), quantized.scale, level

    def process_after_loading(self, layer: nn.Module) -> None:
        """Multiplies out reciprocals and brings the block scales into the layout of the spec.

        Raises:
            QuantConfigError: A leg or a scale was never loaded, or some legs have an input scale
                and others have none.
        """
        loading.check_complete(layer)
        state = loading.load_state(layer)
        if state.finished:
            return
        if self._input_names:
            _scales.finish_input(layer)
        if not self.online:
            _nvfp4_scales.finish_globals(layer)
        if self.physical_signature.layout == "128x4":
            scale = cast("nn.Parameter", layer.weight_scale).detach()
            tiles = nn.Parameter(_fp4.swizzle(scale), requires_grad=False)
            layer.register_parameter("weight_scale", tiles)
        state.finished = True

    def dequantize_weight(self, layer: nn.Module) -> torch.Tensor:
        """Returns the weight ``[N, K]`` in fp32.

        Raises:
            QuantConfigError: `process_after_loading` did not run.
        """
        loading.check_finished(layer)
        codes = cast("nn.Parameter", layer.weight).detach()
        scale = cast("nn.Parameter", layer.weight_scale).detach()
        if self.physical_signature.layout == "128x4":
            scale = _fp4.unswizzle(scale, codes.shape[0], codes.shape[1] * 2 // self.block)
        return _fp4.dequantize(codes, _nvfp4_scales.with_globals(layer, scale), self.block)


def _block(weight: TensorQuant) -> int:
    return 0 if weight.block_shape is None else weight.block_shape[1]


def unsupported(weight: TensorQuant, act: TensorQuant | None) -> str:
    """Returns why the scheme is not stored as nvfp4, or an empty text."""
    seen = f"weight is {weight.describe()}; "
    block = _block(weight)
    if weight.dtype is not QDType.NVFP4 or weight.block_shape != (1, block) or block not in _BLOCKS:
        return f"{seen}allowed: nvfp4 with block_shape (1, 16), or (1, 32) with an fp8 input"
    is_fp8 = act is not None and act.dtype in _activations.FLOAT8_DTYPES
    if block != _BLOCKS[0] and (not is_fp8 or weight.swizzled_scales or weight.rotation_group):
        return f"{seen}allowed: block_shape (1, 32) with an fp8 input and scales in rows"
    plain = weight.symmetric and weight.micro_scaled and not weight.act_order
    if not plain or weight.dynamic:
        return f"weight is {weight.describe()}; allowed: symmetric, micro-scaled, stored scales"
    if act is None:
        return ""
    if act.dtype is QDType.MXFP4 or (act.dtype is not QDType.NVFP4 and act.micro_scaled):
        return f"input is {act.describe()}; allowed: none, nvfp4, or fp8 with fp32 scales"
    return _activations.unsupported(act)


def build(scheme: QuantScheme | None, sm: int | None) -> Nvfp4Spec | None:
    """Returns the spec of nvfp4 weights on disk, or quantized at load under an nvfp4 input.

    The tiles of 128 x 4 are for the block-scaled matrix products of SM100 and later, which need
    both operands in nvfp4; everything else reads rows.
    """
    if scheme is None or scheme.weight.rotation_group or unsupported(scheme.weight, scheme.input):
        return None
    fp4_input = scheme.input is not None and scheme.input.dtype is QDType.NVFP4
    if scheme.online and not fp4_input:
        return None
    layout = "128x4" if fp4_input and sm is not None and sm >= _BLOCK_GEMM_SM else "linear"
    return Nvfp4Spec(scheme.weight, scheme.input, layout=layout, online=scheme.online)
