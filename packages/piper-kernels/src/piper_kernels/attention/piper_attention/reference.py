"""Portable dense Piper attention: the maths in FP32 and the numeric contract.

``attend(prepare(...))`` is the operator. Both are pure functions of tensors and run on any
device; nothing is read back.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels.attention._online_softmax import (
    PROBABILITY_LEVELS,
    TILE_ROWS,
    OnlineSoftmax,
)
from piper_kernels.attention._quantization import (
    Granularity,
    quantize_key,
    quantize_query,
    quantize_value_rows,
)


@dataclass(frozen=True)
class QuantizedOperands:
    """Quantized operands of dense attention; ``Hq = groups * Hkv``.

    Attributes:
        query_codes: int8 ``[B, Hq, Sq, D]``, rotated.
        query_scale: FP32 ``[B, Hq, Sq]``.
        key_codes: int8 ``[B, Hkv, Sk, D]``, centered and rotated.
        key_scale: FP32 ``[B, Hkv, Sk]``.
        value_codes: int8 ``[B, Hkv, Sk, D]``, centered unless causal.
        value_scale: FP32 ``[B, Hkv, Sk]``.
        value_mean: FP32 ``[B, Hkv, D]``; ``None`` when causal.
    """

    query_codes: Tensor
    query_scale: Tensor
    key_codes: Tensor
    key_scale: Tensor
    value_codes: Tensor
    value_scale: Tensor
    value_mean: Tensor | None


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    granularity: Granularity = Granularity.PER_THREAD,
) -> QuantizedOperands:
    """Quantize queries, keys and values.

    Values are centered by their mean over the sequence, except under a causal mask: there the
    mean would let a row depend on later values.

    Args:
        query: ``[B, Hq, Sq, D]``, floating, any strides.
        key: ``[B, Hkv, Sk, D]``.
        value: ``[B, Hkv, Sk, D]``.
        is_causal: Whether :func:`attend` masks later keys.
        granularity: Which rows of queries and keys share a scale.
    """
    value = value.float()
    value_mean = None if is_causal else value.mean(-2)
    if value_mean is not None:
        value = value - value_mean.unsqueeze(-2)
    return QuantizedOperands(
        *quantize_query(query, granularity),
        *quantize_key(key, granularity),
        *quantize_value_rows(value),
        value_mean,
    )


def attend(operands: QuantizedOperands, *, scale: float, is_causal: bool = False) -> Tensor:
    """Return the attention of prepared operands, FP32 ``[B, Hq, Sq, D]``.

    Keys are visited in tiles of 64, which are part of the numeric contract: the codes of
    probabilities refer to the maximum of a tile.

    Args:
        operands: Result of :func:`prepare` with the same ``is_causal``.
        scale: Factor of the logits.
        is_causal: Whether query ``i`` sees keys ``j <= i`` only.
    """
    o = operands
    batch, heads, rows, head_dim = o.query_codes.shape
    kv_heads, keys = o.key_codes.shape[1:3]
    log_value_scale = o.value_scale.log()
    output = o.query_scale.new_empty((batch, heads, rows, head_dim))
    for first, last in query_chunks(batch * heads, rows, output.device):
        window = slice(first, last)
        query = fold_groups(o.query_codes[:, :, window], kv_heads).float()
        query_scale = fold_groups(o.query_scale[:, :, window, None], kv_heads)
        state = OnlineSoftmax.start(query.shape[:-1], head_dim, query.device)
        for start in range(0, min(keys, last) if is_causal else keys, TILE_ROWS):
            tile = slice(start, min(start + TILE_ROWS, keys))
            scores = query @ o.key_codes[:, :, tile].float().mT
            scores.mul_(query_scale).mul_(o.key_scale[:, :, None, tile]).mul_(scale)
            if is_causal and tile.stop - 1 > first:
                mask_later_keys(scores, first, last, start)
            value_scale = o.value_scale[:, :, None, tile]
            state.add(
                scores,
                o.value_codes[:, :, tile],
                log_value_scale[:, :, None, tile],
                (value_scale, float(PROBABILITY_LEVELS)),
            )
        chunk = state.output(o.value_mean)
        output[:, :, window] = chunk.view(batch, heads, last - first, head_dim)
    return output


def piper_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    is_causal: bool,
    *,
    granularity: Granularity = Granularity.PER_THREAD,
) -> Tensor:
    """Return the attention in the dtype of ``query``, contiguous ``[B, Hq, Sq, D]``."""
    operands = prepare(query, key, value, is_causal=is_causal, granularity=granularity)
    return attend(operands, scale=scale, is_causal=is_causal).to(query.dtype)


def query_chunks(sequences: int, rows: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Return windows of query rows that bound the memory of a tile of scores.

    Rows do not influence each other, so results do not depend on the windows. On a CPU the
    scores of a window stay in the cache; elsewhere a few large windows cost fewer launches.
    """
    elements = 2**18 if device.type == "cpu" else 2**24
    step = max(elements // (max(sequences, 1) * TILE_ROWS * TILE_ROWS), 1) * TILE_ROWS
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def fold_groups(x: Tensor, kv_heads: int) -> Tensor:
    """Lay the query heads of a key-value head below one another.

    ``[B, groups * Hkv, R, N]`` becomes ``[B, Hkv, groups * R, N]``.
    """
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def mask_later_keys(scores: Tensor, first: int, last: int, start: int) -> None:
    """Set scores of keys after their query to negative infinity, in place.

    Args:
        scores: ``[B, Hkv, groups * (last - first), N]``.
        first: Position of the first query.
        last: Position after the last query.
        start: Position of the first key.
    """
    rows = torch.arange(first, last, device=scores.device)
    keys = torch.arange(start, start + scores.shape[-1], device=scores.device)
    later = keys > rows[:, None]
    scores.unflatten(2, (-1, last - first)).masked_fill_(later, float("-inf"))
