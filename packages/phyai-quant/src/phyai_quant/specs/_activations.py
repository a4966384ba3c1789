"""Quantization of activations to float formats, in plain PyTorch on any device."""

import torch
from torch import nn

from phyai_quant.scheme import Granularity, QDType, TensorQuant
from phyai_quant.specs.base import ActivationView

FLOAT8_DTYPES = {QDType.FP8_E4M3: torch.float8_e4m3fn, QDType.FP8_E5M2: torch.float8_e5m2}
"""Storage of the 8-bit float formats."""

FLOAT_MAX = {QDType.FP8_E4M3: 448.0, QDType.FP8_E5M2: 57344.0, QDType.MXFP4: 6.0}
"""Largest finite magnitudes."""

_MICRO_GROUPS = {QDType.FP8_E4M3: 32, QDType.FP8_E5M2: 32, QDType.MXFP4: 32, QDType.NVFP4: 16}
# Exponents of the largest powers of two that the formats hold.
_MAX_EXPONENTS = {QDType.FP8_E4M3: 8, QDType.FP8_E5M2: 15, QDType.MXFP4: 2}
_SCALE_FLOOR = 1e-12


def unsupported(act: TensorQuant) -> str:
    """Returns why an activation cannot be quantized this way, or an empty text.

    Allowed are symmetric fp8_e4m3 and fp8_e5m2 with fp32 scales (a static one per_tensor; dynamic
    ones per_tensor, per token or in groups along K), their micro-scaled forms and mxfp4 with
    dynamic e8m0 scales of 32 elements, and nvfp4 with blocks of 16.
    """
    seen = f"input is {act.describe()}; "
    if act.dtype not in _MICRO_GROUPS or not act.symmetric:
        allowed = ", ".join(dtype.value for dtype in _MICRO_GROUPS)
        return f"{seen}allowed: symmetric {allowed}"
    if act.micro_scaled or act.dtype not in FLOAT8_DTYPES:
        return _unsupported_micro(act, seen)
    if not act.dynamic and act.granularity is not Granularity.PER_TENSOR:
        return f"{seen}a static scale is allowed per_tensor only"
    if act.block_shape is not None and act.block_shape[0] != 1:
        return f"{seen}allowed block_shape: (1, group along K)"
    return ""


def _unsupported_micro(act: TensorQuant, seen: str) -> str:
    block = (1, _MICRO_GROUPS[act.dtype])
    if act.block_shape != block or not act.micro_scaled:
        return f"{seen}allowed: micro-scaled with block_shape {block}"
    if not act.dynamic and act.dtype is not QDType.NVFP4:
        return f"{seen}allowed: dynamic scales"
    return ""


def signature_fields(act: TensorQuant | None) -> tuple[tuple[str, str], ...]:
    """Returns the facts about the input that a physical signature carries."""
    if act is None:
        return (("activation", "a16"),)
    return (
        ("activation", act.dtype.value),
        ("input_granularity", act.granularity.value),
        ("input_scale", "dynamic" if act.dynamic else "static"),
    )


def quantize(
    x: torch.Tensor, act: TensorQuant, static_scale: torch.Tensor | None = None
) -> ActivationView:
    """Quantizes an activation; the arithmetic is fp32.

    fp8: a static scale divides the whole tensor; a dynamic one is ``max|x| / format_max``, at least
    1e-12. Micro-scaled fp8 and mxfp4: the scale is ``2^(floor(log2(max|x|)) - e)``, with e the
    exponent of the format's largest power of two (OCP Microscaling formats, section 6.3). nvfp4:
    the static scale, or ``max|x| / (448 * 6)`` of the whole tensor, multiplies the e4m3 block
    scales ``max|block| / 6``. Quotients saturate and round to nearest, ties to even codes.

    Args:
        x: ``[..., K]`` in fp32, fp16 or bf16, any strides.
        act: A format that `unsupported` has no objection to.
        static_scale: fp32 ``[1]``: the scale of a static fp8 input, the global one of nvfp4.

    Returns:
        Codes ``[M, K]`` and fp32 scales. E2M1 values of 4-bit formats are held in float8 e4m3.
    """
    rows = x.reshape(-1, x.shape[-1]).float()
    if act.dtype is QDType.NVFP4:
        scale = _nvfp4_scale(rows, act, static_scale)
    elif act.micro_scaled:
        scale = _power_of_two(_maxima(rows, act), _MAX_EXPONENTS[act.dtype])
    elif static_scale is not None:
        scale = static_scale
    else:
        scale = (_maxima(rows, act) / FLOAT_MAX[act.dtype]).clamp_min(_SCALE_FLOOR)
    return ActivationView(
        _encode(rows / _per_element(scale, rows, act), act.dtype), scale, act.granularity
    )


def _nvfp4_scale(
    rows: torch.Tensor, act: TensorQuant, static_scale: torch.Tensor | None
) -> torch.Tensor:
    maxima = _maxima(rows, act)
    if static_scale is None:
        largest = maxima.amax() if maxima.numel() else maxima.new_zeros(())
        static_scale = largest / (448.0 * 6.0)
    level = static_scale.clamp_min(_SCALE_FLOOR)
    tiny = torch.finfo(torch.float8_e4m3fn).tiny
    return (maxima / 6.0 / level).clamp(tiny, 448.0).to(torch.float8_e4m3fn).float() * level


def _power_of_two(maxima: torch.Tensor, max_exponent: int) -> torch.Tensor:
    # frexp writes a maximum as m * 2^e with m in [0.5, 1); 2^-127 would be subnormal in fp32.
    exponent = torch.frexp(maxima.clamp_min(2.0**-126)).exponent - 1 - max_exponent
    exponent = exponent.clamp(-126, 127)
    scale = torch.ldexp(torch.ones_like(maxima), exponent)
    return torch.where(maxima.isfinite(), scale, torch.nan)


def _encode(quotients: torch.Tensor, dtype: QDType) -> torch.Tensor:
    if dtype in FLOAT8_DTYPES:
        bound = FLOAT_MAX[dtype]
        return quotients.clamp(-bound, bound).to(FLOAT8_DTYPES[dtype])
    return _nearest_e2m1(quotients).to(torch.float8_e4m3fn)


def _nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    # 0, 0.5 .. 2, then 2, 3, 4, then 4, 6: steps of 0.5, 1 and 2; round() takes ties to even.
    magnitude = values.abs().clamp_max(6.0)
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.copysign((magnitude / step).round() * step, values)


def _maxima(rows: torch.Tensor, act: TensorQuant) -> torch.Tensor:
    """Returns the largest magnitudes of ``rows`` ``[M, K]`` that share a scale.

    Returns:
        ``[1]`` per tensor, ``[M]`` per token, ``[M, ceil(K/g)]`` for groups of g along K.
    """
    magnitudes = rows.abs()
    if act.block_shape is not None:
        group = act.block_shape[1]
        padded = nn.functional.pad(magnitudes, (0, -rows.shape[1] % group))
        return padded.unflatten(1, (-1, group)).amax(dim=2)
    if act.granularity is Granularity.PER_CHANNEL:
        return magnitudes.amax(dim=1)
    if rows.numel() == 0:
        return rows.new_zeros(1)
    return magnitudes.amax().reshape(1)


def _per_element(scale: torch.Tensor, rows: torch.Tensor, act: TensorQuant) -> torch.Tensor:
    if act.block_shape is not None:
        return scale.repeat_interleave(act.block_shape[1], 1)[:, : rows.shape[1]]
    return scale[:, None]
