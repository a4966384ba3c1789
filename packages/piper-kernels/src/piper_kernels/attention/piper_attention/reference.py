"""Portable dense Piper attention: the maths in FP32 and the numeric contract.

``attend(prepare(...))`` is the operator. Both are pure functions of tensors and run on any
device; nothing is read back.
"""

from dataclasses import dataclass

from torch import Tensor

from piper_kernels.attention._online_softmax import PROBABILITY_LEVELS, OnlineSoftmax
from piper_kernels.attention._quantization import (
    Granularity,
    quantize_key,
    quantize_query,
    quantize_value_rows,
)
from piper_kernels.attention._tiles import query_windows, score_tiles, unfold_groups


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
    kv_heads = o.key_codes.shape[1]
    log_value_scale = o.value_scale.log()
    output = o.query_scale.new_empty((batch, heads, rows, head_dim))
    for window in query_windows(batch * heads, rows, output.device):
        positions = range(window.start, window.stop)
        folded = (batch, kv_heads, heads // kv_heads * len(positions))
        state = OnlineSoftmax.start(folded, head_dim, output.device)
        for tile, scores in score_tiles(
            o.query_codes[:, :, window],
            o.query_scale[:, :, window],
            o.key_codes,
            o.key_scale,
            positions=positions,
            scale=scale,
            is_causal=is_causal,
        ):
            state.add(
                scores,
                o.value_codes[:, :, tile],
                log_value_scale[:, :, None, tile],
                (o.value_scale[:, :, None, tile], float(PROBABILITY_LEVELS)),
            )
        output[:, :, window] = unfold_groups(state.output(o.value_mean), heads)
    return output


def attention(
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
