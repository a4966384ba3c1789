"""Round-to-nearest quantization of weights in plain PyTorch, on any device.

Every granularity is one case: per_tensor is a single block ``(N, K)``, per_channel has blocks
``(1, K)``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phyai_quant.scheme import Granularity, QDType, QuantConfigError, TensorQuant
from phyai_quant.specs._packing import E2M1_VALUES

FLOAT_MAX = {QDType.FP8_E4M3: 448.0, QDType.FP8_E5M2: 57344.0, QDType.NVFP4: 6.0, QDType.MXFP4: 6.0}
"""Largest finite magnitude of each float format."""

INT_BITS = {QDType.INT4: 4, QDType.INT8: 8}
"""Width of each integer format."""

FP8_DTYPES = {QDType.FP8_E4M3: torch.float8_e4m3fn, QDType.FP8_E5M2: torch.float8_e5m2}
# (mantissa bits, exponent of the smallest normal number)
_FP8_FIELDS = {QDType.FP8_E4M3: (3, -6), QDType.FP8_E5M2: (2, -14)}
_SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Keeps the scale of an all-zero block above zero.
_RANGE_SEED = 1e-30
_NVFP4_GLOBAL_FLOOR = 1e-12


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight ``[N, K]`` as codes and scales.

    Attributes:
        codes: ``[N, K]``: int8 values of int4 and int8, float8 values of fp8, uint8 E2M1 codes
            (sign in bit 3) of nvfp4 and mxfp4.
        scale: Multipliers: ``[1]`` per_tensor, ``[N]`` per_channel, ``[ceil(N/bn), ceil(K/bk)]``
            for blocks; float8 e4m3 for nvfp4, float8 e8m0 for mxfp4.
        global_scale: fp32 ``[1]`` that multiplies every scale of nvfp4; else None.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None = None


def quantize(
    weight: Tensor,
    quant: TensorQuant,
    *,
    scale_dtype: torch.dtype = torch.float32,
    negative_scales: bool = True,
    extremes: tuple[float, float] | None = None,
) -> QuantizedWeight:
    """Quantizes a weight to nearest; codes follow the fp32 scale, which is then rounded.

    Integers: the scale maps the larger extreme of a block to ``-2^(b-1)``, with a negative scale
    when that extreme is positive, so no code is wasted. Floats: ``amax / format_max``, ties toward
    zero; mxfp4 rounds the scale up to a power of two; nvfp4 takes
    ``global = amax / (448 * 6)`` and e4m3 block scales ``amax16 / 6 / global``.

    Args:
        weight: ``[N, K]`` in fp32, fp16 or bf16; may be strided. The last block along either
            dimension may be partial.
        quant: Symmetric stored format: int4, int8, fp8_e4m3, fp8_e5m2, nvfp4 or mxfp4.
        scale_dtype: Dtype of the returned scales, except of nvfp4 and mxfp4: fp32, fp16 or bf16.
        negative_scales: False keeps integer scales positive, as most checkpoint formats do; the
            positive extreme then maps to ``2^(b-1) - 1``.
        extremes: Lowest and highest value of the whole weight when ``weight`` is a part of it;
            needed for per_tensor and nvfp4, whose scales depend on all values.

    Returns:
        Codes and scales on the weight's device.

    Raises:
        QuantConfigError: A format that this cannot produce; a source that is not 2-D, not
            floating, not finite, or too large for ``scale_dtype``.
    """
    _check_format(quant)
    _check_source(weight)
    blocks = _to_blocks(weight.detach().float(), quant)
    low, high = blocks.amin((2, 3)), blocks.amax((2, 3))
    if extremes is not None and quant.granularity is Granularity.PER_TENSOR:
        low, high = low.new_full((1, 1), extremes[0]), high.new_full((1, 1), extremes[1])
    largest = torch.maximum(low.abs(), high.abs())
    global_scale = None
    if quant.dtype in INT_BITS:
        bits = INT_BITS[quant.dtype]
        scale = _int_scale(low, high, bits, negative_scales)
        codes = _round_int(blocks, scale, bits)
        stored = scale.to(scale_dtype)
    elif quant.dtype is QDType.NVFP4:
        whole = largest.amax() if extremes is None else largest.new_tensor(extremes).abs().amax()
        global_scale, stored, codes = _quantize_nvfp4(blocks, largest, whole)
    elif quant.dtype is QDType.MXFP4:
        stored, codes = _quantize_mxfp4(blocks, largest)
    else:
        scale = _divide(largest.clamp_min(_RANGE_SEED), FLOAT_MAX[quant.dtype])
        codes = encode_fp8(blocks * scale.reciprocal()[..., None, None], quant.dtype)
        stored = scale.to(scale_dtype)
    _check_scales(stored, quant)
    return QuantizedWeight(
        _from_blocks(codes, weight.shape), _scale_shape(stored, quant), global_scale
    )


def dequantize(quantized: QuantizedWeight, quant: TensorQuant) -> Tensor:
    """Returns the weight ``[N, K]`` in fp32: codes times their scales."""
    codes = quantized.codes
    if codes.dtype is torch.uint8:
        table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
        values = table[codes.long()]
    else:
        values = codes.float()
    scale = quantized.scale.float()
    if quantized.global_scale is not None:
        scale = scale * quantized.global_scale
    return values * expand_scale(scale, quant, codes.shape)


def expand_scale(scale: Tensor, quant: TensorQuant, shape: torch.Size | tuple[int, int]) -> Tensor:
    """Returns a scale in a shape that multiplies a weight of ``shape`` ``[N, K]``."""
    if quant.block_shape is None:
        return scale.reshape(-1, 1)
    block_n, block_k = quant.block_shape
    wide = scale.repeat_interleave(block_n, 0).repeat_interleave(block_k, 1)
    return wide[: shape[0], : shape[1]]


def encode_fp8(values: Tensor, dtype: QDType) -> Tensor:
    """Rounds fp32 values to a float8 format: nearest, ties toward zero, saturating."""
    mantissa, exponent_min = _FP8_FIELDS[dtype]
    magnitude = values.abs()
    # frexp writes x as m * 2^e with m in [0.5, 1): the exponent of the leading bit is e - 1
    exponent = (torch.frexp(magnitude).exponent - 1).clamp_min(exponent_min)
    steps = torch.ceil(magnitude * _power_of_two(mantissa - exponent) - 0.5)
    rounded = (steps * _power_of_two(exponent - mantissa)).clamp_max(FLOAT_MAX[dtype])
    return torch.copysign(rounded, values).to(FP8_DTYPES[dtype])


def encode_e2m1(values: Tensor) -> Tensor:
    """Rounds values to uint8 E2M1 codes (sign in bit 3): nearest, ties toward zero, saturating."""
    thresholds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
    codes = torch.bucketize(values.abs().contiguous(), thresholds, out_int32=True).to(torch.uint8)
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def _int_scale(low: Tensor, high: Tensor, bits: int, negative_scales: bool) -> Tensor:
    above, below = high.clamp_min(_RANGE_SEED), low.clamp_max(-_RANGE_SEED).neg()
    top = 2 ** (bits - 1)
    if not negative_scales:
        return torch.maximum(below / top, _divide(above, top - 1))
    larger, smaller = torch.maximum(above, below), torch.minimum(above, below)
    scale = torch.maximum(larger / top, _divide(smaller, top - 1))
    return torch.where(above > below, -scale, scale)


def _round_int(blocks: Tensor, scale: Tensor, bits: int) -> Tensor:
    top = 2 ** (bits - 1)
    steps = torch.round(blocks * scale.reciprocal()[..., None, None])
    return steps.clamp(-top, top - 1).to(torch.int8)


def _quantize_mxfp4(blocks: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    wanted = _divide(largest.clamp_min(_RANGE_SEED), FLOAT_MAX[QDType.MXFP4])
    mantissa, exponent = torch.frexp(wanted)
    # an exact power of two has mantissa 0.5 and must not be doubled
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scale = _power_of_two(exponent)
    stored = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return stored, encode_e2m1(blocks * scale.reciprocal()[..., None, None])


def _quantize_nvfp4(
    blocks: Tensor, largest: Tensor, whole: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    global_scale = _divide(whole, 448.0 * 6.0).clamp_min(_NVFP4_GLOBAL_FLOOR).reshape(1)
    tiny = torch.finfo(torch.float8_e4m3fn).tiny
    scale = (_divide(largest, 6.0) / global_scale).clamp(tiny, 448.0).to(torch.float8_e4m3fn)
    steps = (scale.float() * global_scale)[..., None, None]
    return global_scale, scale, encode_e2m1(blocks / steps)


def _divide(values: Tensor, divisor: float) -> Tensor:
    """Returns the rounded quotient on every device.

    GPUs multiply by the reciprocal of a Python number, which can be one rounding off.
    """
    return values / torch.full_like(values, divisor)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Returns fp32 ``2^exponent`` of int32 exponents -126..127, exactly: powers on GPUs are not."""
    return ((exponent + 127) << 23).view(torch.float32)


def _to_blocks(weight: Tensor, quant: TensorQuant) -> Tensor:
    """Returns ``[N/bn, K/bk, bn, bk]``, zero-padded to whole blocks."""
    rows, columns = weight.shape
    block_n, block_k = _block_shape(quant, rows, columns)
    padded = nn.functional.pad(weight, (0, -columns % block_k, 0, -rows % block_n))
    return padded.unflatten(1, (-1, block_k)).unflatten(0, (-1, block_n)).transpose(1, 2)


def _from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    whole = blocks.transpose(1, 2).flatten(2, 3).flatten(0, 1)
    return whole[: shape[0], : shape[1]].contiguous()


def _block_shape(quant: TensorQuant, rows: int, columns: int) -> tuple[int, int]:
    if quant.granularity is Granularity.PER_TENSOR:
        return rows, columns
    return quant.block_shape or (1, columns)


def _scale_shape(scale: Tensor, quant: TensorQuant) -> Tensor:
    return scale if quant.block_shape is not None else scale.reshape(-1)


def _check_format(quant: TensorQuant) -> None:
    known = (*INT_BITS, *FLOAT_MAX)
    micro = quant.dtype in (QDType.NVFP4, QDType.MXFP4)
    if quant.dtype not in known or not quant.symmetric or quant.dynamic:
        raise QuantConfigError(
            f"cannot round a weight to {quant.describe()}; allowed: symmetric, not dynamic "
            f"{', '.join(known)}"
        )
    if micro is not quant.micro_scaled or quant.act_order or quant.rotation_group is not None:
        raise QuantConfigError(
            f"cannot round a weight to {quant.describe()}; allowed: micro_scaled exactly for "
            "nvfp4 and mxfp4, no act_order, no rotation_group"
        )


def _check_source(weight: Tensor) -> None:
    if weight.ndim != 2 or weight.numel() == 0 or weight.dtype not in _SOURCE_DTYPES:
        raise QuantConfigError(
            f"cannot quantize a {weight.dtype} tensor of shape {list(weight.shape)}; allowed: "
            f"[N, K] with N and K at least 1 in {', '.join(map(str, _SOURCE_DTYPES))}"
        )
    if not bool(torch.isfinite(weight).all()):
        raise QuantConfigError(
            "cannot quantize a weight that holds NaN or infinite values; allowed: finite values; "
            "repair the checkpoint"
        )


def _check_scales(stored: Tensor, quant: TensorQuant) -> None:
    if stored.dtype in _SOURCE_DTYPES and not bool(torch.isfinite(stored).all()):
        raise QuantConfigError(
            f"a scale of {quant.describe()} is too large for {stored.dtype}; allowed: scales up to "
            f"{torch.finfo(stored.dtype).max:g}; use bf16 or fp32 scales"
        )
