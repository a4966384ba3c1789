"""Preparation of dense Piper attention and SageAttention2++.

Storage is that of ``piper_attention.prepared`` with rows padded to 64, except that every 32 keys
of transposed values are permuted: slot ``16 h + 4 t + 2 a + b`` holds key
``16 h + 8 a + 2 t + b``. That is the order in which 8-bit matrix instructions read accumulators
of the product of queries and keys. ``permuted=False`` leaves keys in their order.
"""

# pyright: reportArgumentType=false

from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels._triton.runtime import launch_guard
from piper_kernels.attention._preparation._launch import Quantized, Values, quantize
from piper_kernels.attention._preparation._repack_kernels import repack_kernel
from piper_kernels.attention._preparation._statistics import statistics, tiles_of
from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.piper_attention.prepared import LOG2_E


@dataclass(frozen=True)
class PiperKeyValue:
    """Prepared keys and values of ``Hkv`` heads; ``R`` is ``Sk`` rounded up to 64.

    Attributes:
        key_codes: int8 ``[B, Hkv, R, D]``, centered and rotated; rows past the end are zero.
        key_scale: FP32 ``[B, Hkv, R / 64]`` per warp, ``[B, Hkv, R]`` per thread.
        value_codes: int8 ``[B, Hkv, D, R]``, transposed, centered unless causal; keys past the
            end are zero.
        value_multiplier: FP32 ``[B, Hkv, R]``, 255 times the scale of a key, in order of keys;
            ``None`` where the 64 keys of a tile share their scale.
        value_log_max: FP32 ``[B, Hkv, R / 64]``, the base-2 logarithm of the largest scale of 64
            keys; ``None`` without sums.
        value_sum: int32 ``[B, Hkv, ceil(R / 128), D]``: bits of the FP32 numbers ``127 s + b``
            with ``s`` the sum of the codes of 128 keys and ``b`` in turn ``1.5 * 2**23`` and
            ``-1.5 * 2**23``; ``None`` without sums.
        value_mean: FP32 ``[B, Hkv, D]``; ``None`` when causal.
    """

    key_codes: Tensor
    key_scale: Tensor
    value_codes: Tensor
    value_multiplier: Tensor | None
    value_log_max: Tensor | None
    value_sum: Tensor | None
    value_mean: Tensor | None


@dataclass(frozen=True)
class PiperOperands:
    """Operands of dense Piper attention.

    Attributes:
        query_codes: int8 ``[B, Hq, R, D]``, rotated, ``R`` the queries rounded up to 64.
        query_scale: FP32 ``[B, Hq, R / 32]`` per warp, ``[B, Hq, R]`` per thread, with the factor
            of the logits and ``log2(e)``.
        key_value: Keys and values.
    """

    query_codes: Tensor
    query_scale: Tensor
    key_value: PiperKeyValue


@dataclass(frozen=True)
class SageOperands:
    """Operands of SageAttention2++; sizes are those of :class:`PiperOperands`.

    Attributes:
        query_codes: int8 ``[B, H, R, D]``.
        query_scale: FP32, with the factor of the logits and ``log2(e)``.
        key_codes: int8 ``[B, H, R, D]``.
        key_scale: FP32.
        value_codes: float8_e4m3fn ``[B, H, D, R]``, transposed; keys past the end are zero.
        value_scale: FP32 ``[B, H, D]``.
    """

    query_codes: Tensor
    query_scale: Tensor
    key_codes: Tensor
    key_scale: Tensor
    value_codes: Tensor
    value_scale: Tensor


def prepare_piper(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    is_causal: bool,
    granularity: Granularity = Granularity.PER_WARP,
    permuted: bool = True,
    sums: bool = True,
    values_per_tile: bool = False,
) -> PiperOperands:
    """Quantize all operands of dense Piper attention, ``[B, H, S, D]``, in three launches.

    Args:
        query: FP16, BF16 or FP32 of ``Hq`` heads; features are contiguous, other strides free.
        key: The same of ``Hkv`` heads.
        value: The same.
        scale: Factor of the logits.
        is_causal: Leaves values uncentered.
        granularity: Which rows of queries and keys share a scale.
        permuted: Whether the keys of value codes are permuted.
        sums: Whether sums of value codes and logarithms of their scales are stored.
        values_per_tile: Whether 64 keys share a value scale; not when causal, as rows would
            depend on later values.
    """
    known = statistics(key, None if is_causal else value, None)
    parts = quantize(
        query,
        key,
        value,
        known,
        query_factor=scale * LOG2_E,
        granularity=granularity,
        values=_values(is_causal, values_per_tile),
        permuted=permuted,
        sums=sums,
    )
    key_value = _key_value(parts, None if is_causal else known.value, sums, values_per_tile)
    return PiperOperands(parts.query.codes, parts.query.scale, key_value)


def prepare_piper_key_value(
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    granularity: Granularity = Granularity.PER_WARP,
    permuted: bool = True,
    sums: bool = True,
) -> PiperKeyValue:
    """Quantize keys and values; see :func:`prepare_piper`."""
    known = statistics(key, None if is_causal else value, None)
    parts = quantize(
        None,
        key,
        value,
        known,
        granularity=granularity,
        values=_values(is_causal, per_tile=False),
        permuted=permuted,
        sums=sums,
    )
    return _key_value(parts, None if is_causal else known.value, sums, per_tile=False)


def prepare_query(
    query: Tensor, *, scale: float, granularity: Granularity = Granularity.PER_WARP
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of queries; see :class:`PiperOperands`."""
    factor = scale * LOG2_E
    parts = quantize(query, None, None, None, query_factor=factor, granularity=granularity)
    return parts.query.codes, parts.query.scale


def prepare_sage(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    granularity: Granularity = Granularity.PER_WARP,
    permuted: bool = True,
) -> SageOperands:
    """Quantize queries and keys to INT8 and values to E4M3; see :func:`prepare_piper`.

    Args:
        query: Floating ``[B, H, Sq, D]``.
        key: Floating ``[B, H, Sk, D]``.
        value: Floating ``[B, H, Sk, D]``.
        scale: Factor of the logits.
        granularity: Which rows of queries and keys share a scale.
        permuted: Whether the keys of value codes are permuted.
    """
    known = statistics(key, value, None, value_scales=True)
    parts = quantize(
        query,
        key,
        value,
        known,
        query_factor=scale * LOG2_E,
        granularity=granularity,
        values=Values.E4M3,
        permuted=permuted,
    )
    q, k = parts.query, parts.key
    return SageOperands(q.codes, q.scale, k.codes, k.scale, parts.value.codes, known.value)


def repack_value(codes: Tensor, multiplier: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return permuted codes, logarithms and sums of values that are stored in order of keys.

    Args:
        codes: int8 ``[B, Hkv, D, R]``, contiguous, ``R`` a multiple of 64.
        multiplier: FP32 ``[B, Hkv, R]``, contiguous, or ``[B, Hkv, R / 64]``.

    Returns:
        ``value_codes``, ``value_log_max`` and ``value_sum`` of :class:`PiperKeyValue`.
    """
    *lead, head_dim, rows = codes.shape
    tiles = tiles_of(rows)
    sums = -(-tiles // 2)
    permuted = torch.empty_like(codes)
    log_max = multiplier.new_empty((*lead, tiles))
    value_sum = torch.empty((*lead, sums, head_dim), dtype=torch.int32, device=codes.device)
    with launch_guard(codes.device):
        repack_kernel[(sums, lead[0] * lead[1])](
            codes.view(torch.int16),
            multiplier,
            permuted.view(torch.int16),
            log_max,
            value_sum,
            tiles,
            D=head_dim,
            PER_TILE=multiplier.shape[-1] == tiles,
        )
    return permuted, log_max, value_sum


def _values(is_causal: bool, per_tile: bool) -> Values:
    if per_tile:
        return Values.PER_TILE
    return Values.PER_KEY if is_causal else Values.CENTERED


def _key_value(parts: Quantized, mean: Tensor | None, sums: bool, per_tile: bool) -> PiperKeyValue:
    k, v = parts.key, parts.value
    multiplier = None if per_tile else v.multiplier
    summed = (v.logs, v.sums) if sums else (None, None)
    return PiperKeyValue(k.codes, k.scale, v.codes, multiplier, *summed, mean)
