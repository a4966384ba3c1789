"""Prepared storage of dense Piper attention, as native backends store and read it.

:func:`prepare` says what preparation kernels must write and :func:`attend` what an attention
kernel computes from it. Softmax is in base 2: the query scale contains the factor of the logits
and ``log2(e)``. Values are transposed, because 8-bit matrix instructions need both operands with
the reduction axis, here the keys, contiguous.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from piper_kernels.attention._online_softmax import PROBABILITY_LEVELS, OnlineSoftmax
from piper_kernels.attention._quantization import (
    Granularity,
    RowGroups,
    quantize_key,
    quantize_query,
    quantize_value_rows,
)
from piper_kernels.attention._tiles import (
    TILE_ROWS,
    query_windows,
    score_tiles,
    unfold_groups,
)

LOG2_E = math.log2(math.e)
# The bits of an FP32 number are a piecewise linear logarithm that is at most 0.0861 too low.
_LOG_BOUND_OFFSET = 127 + math.log2(PROBABILITY_LEVELS) - 0.086085
_MANTISSA_STEPS = 2**23


@dataclass(frozen=True)
class PreparedKeyValue:
    """Prepared keys and values of ``Hkv`` heads.

    Attributes:
        key_codes: int8 ``[B, Hkv, Sk', D]``; ``Sk'`` is ``Sk``, or that rounded up to 64 with
            zero codes.
        key_scale: FP32; ``[B, Hkv, ceil(Sk' / 64)]`` per warp, ``[B, Hkv, Sk']`` per thread.
        value_codes: int8 ``[B, Hkv, D, Sk']``, transposed; centered unless causal.
        value_multiplier: FP32 ``[B, Hkv, Sk']``, 255 times the value scale; or, where 64 keys
            share one, ``[B, Hkv, Sk' / 64]``. Causal rows must not depend on later values, so
            causal attention needs one for each key.
        value_log_scale: Of the same shape, the base-2 logarithm of the value scale; ``None``
            where its bound is derived from the multiplier.
        value_mean: FP32 ``[B, Hkv, D]``; ``None`` when causal.
    """

    key_codes: Tensor
    key_scale: Tensor
    value_codes: Tensor
    value_multiplier: Tensor
    value_log_scale: Tensor | None
    value_mean: Tensor | None

    @property
    def values_per_tile(self) -> bool:
        """Whether 64 keys share a value scale."""
        return self.value_multiplier.shape[2] != self.value_codes.shape[3]

    def per_key(self, scales: Tensor) -> Tensor:
        """Return value scales with one for every key."""
        return scales.repeat_interleave(TILE_ROWS, -1) if self.values_per_tile else scales


@dataclass(frozen=True)
class PreparedAttention:
    """Operands of dense attention in prepared storage; ``Hq = groups * Hkv``.

    Attributes:
        query_codes: int8 ``[B, Hq, Sq', D]``; ``Sq'`` is ``Sq``, or that rounded up to 64 with
            zero codes.
        query_scale: FP32 with the factor of the logits and ``log2(e)``;
            ``[B, Hq, ceil(Sq' / 32)]`` per warp, ``[B, Hq, Sq']`` per thread.
        key_value: Keys and values.
        granularity: Which rows of queries and keys share a scale.
    """

    query_codes: Tensor
    query_scale: Tensor
    key_value: PreparedKeyValue
    granularity: Granularity = Granularity.PER_WARP


def prepare_query(
    query: Tensor, *, scale: float, granularity: Granularity, padded: bool = False
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of ``query``, ``[B, Hq, Sq, D]``; see :class:`PreparedAttention`."""
    codes, row_scale = quantize_query(query, granularity)
    padding = -codes.shape[2] % TILE_ROWS if padded else 0
    stored = _stored_scale(row_scale * (scale * LOG2_E), granularity.query, padding)
    return functional.pad(codes, (0, 0, 0, padding)), stored


def prepare_key_value(
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    granularity: Granularity = Granularity.PER_WARP,
    padded: bool = False,
    derive_log_bound: bool = False,
) -> PreparedKeyValue:
    """Quantize keys and values ``[B, Hkv, Sk, D]``.

    Args:
        key: Floating, any strides.
        value: Floating, any strides.
        is_causal: Leaves values uncentered.
        granularity: Which rows of keys share a scale.
        padded: Whether rows are padded to a multiple of 64.
        derive_log_bound: Whether no logarithms are stored.
    """
    key_codes, row_scale = quantize_key(key, granularity)
    padding = -key.shape[2] % TILE_ROWS if padded else 0
    value = value.float()
    value_mean = None if is_causal else value.mean(-2)
    if value_mean is not None:
        value = value - value_mean.unsqueeze(-2)
    value_codes, value_scale = quantize_value_rows(functional.pad(value, (0, 0, 0, padding)))
    return PreparedKeyValue(
        key_codes=functional.pad(key_codes, (0, 0, 0, padding)),
        key_scale=_stored_scale(row_scale, granularity.key, padding),
        value_codes=value_codes.mT.contiguous(),
        value_multiplier=value_scale * PROBABILITY_LEVELS,
        value_log_scale=None if derive_log_bound else value_scale.log2(),
        value_mean=value_mean,
    )


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    is_causal: bool = False,
    granularity: Granularity = Granularity.PER_WARP,
    padded: bool = False,
    derive_log_bound: bool = False,
) -> PreparedAttention:
    """Quantize all operands; :func:`prepare_query` and :func:`prepare_key_value` in one call."""
    codes, query_scale = prepare_query(query, scale=scale, granularity=granularity, padded=padded)
    key_value = prepare_key_value(
        key,
        value,
        is_causal=is_causal,
        granularity=granularity,
        padded=padded,
        derive_log_bound=derive_log_bound,
    )
    return PreparedAttention(codes, query_scale, key_value, granularity)


def attend(
    prepared: PreparedAttention,
    *,
    query_length: int,
    key_length: int,
    is_causal: bool = False,
    query_start: int = 0,
    query_origin: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the attention of a window of prepared queries, ``[B, Hq, query_length, D]``.

    Args:
        prepared: Operands.
        query_length: Queries of the window, without padding.
        key_length: Keys without padding.
        is_causal: Whether keys after their query are masked.
        query_start: First query of the window in the prepared storage.
        query_origin: Position of that query in its sequence, for the causal mask; by default
            ``query_start``.
        out: Floating ``[B, Hq, query_length, D]`` with any strides that overlap nowhere, to
            write into; by default a new FP32 tensor.
    """
    kv, groups = prepared.key_value, prepared.granularity
    batch, heads, _, head_dim = prepared.query_codes.shape
    kv_heads = kv.key_codes.shape[1]
    origin = query_start if query_origin is None else query_origin
    if out is None:
        out = prepared.query_scale.new_empty((batch, heads, query_length, head_dim))
    query_scale = _row_scale(prepared.query_scale, groups.query, prepared.query_codes.shape[2])
    key_scale = _row_scale(kv.key_scale, groups.key, key_length)
    log_scale = kv.value_log_scale
    log_scale = log_scale_bound(kv.value_multiplier) if log_scale is None else log_scale.float()
    multiplier, log_scale = kv.per_key(kv.value_multiplier), kv.per_key(log_scale)
    for window in query_windows(batch * heads, query_length, out.device):
        stored = slice(query_start + window.start, query_start + window.stop)
        positions = range(origin + window.start, origin + window.stop)
        folded = (batch, kv_heads, heads // kv_heads * len(positions))
        state = OnlineSoftmax.start(folded, head_dim, out.device)
        for tile, scores in score_tiles(
            prepared.query_codes[:, :, stored],
            query_scale[:, :, stored],
            kv.key_codes[:, :, :key_length],
            key_scale,
            positions=positions,
            scale=None,
            is_causal=is_causal,
        ):
            state.add(
                scores,
                kv.value_codes[:, :, :, tile].mT,
                log_scale[:, :, None, tile],
                (multiplier[:, :, None, tile],),
                torch.exp2,
            )
        out[:, :, window] = unfold_groups(state.output(kv.value_mean), heads).to(out.dtype)
    return out


def log_scale_bound(value_multiplier: Tensor) -> Tensor:
    """Return an upper bound of ``log2(value_multiplier / 255)`` from the bits of FP32 numbers.

    It is at most 0.0862 too high, so probability codes stay within 255 and lose less than 6
    percent of their range; the value of the attention does not depend on it otherwise.
    """
    bits = value_multiplier.contiguous().view(torch.int32)
    return (bits.double() / _MANTISSA_STEPS - _LOG_BOUND_OFFSET).float()


def _stored_scale(row_scale: Tensor, groups: RowGroups, padding: int) -> Tensor:
    """Return scales per row, or per block where its rows share one."""
    padded = functional.pad(row_scale, (0, padding))
    return padded[..., :: groups.block].contiguous() if groups.groups == 1 else padded


def _row_scale(stored: Tensor, groups: RowGroups, rows: int) -> Tensor:
    """Undo :func:`_stored_scale` for the first ``rows`` rows."""
    if groups.groups == 1:
        stored = stored.repeat_interleave(groups.block, -1)
    return stored[..., :rows]
