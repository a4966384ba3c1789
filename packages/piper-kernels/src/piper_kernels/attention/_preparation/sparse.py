"""Preparation of sparse Piper attention: codes and routing summaries."""

from torch import Tensor

from piper_kernels.attention._preparation._launch import Values, quantize
from piper_kernels.attention._preparation._statistics import (
    Summary,
    statistics,
    summarized_statistics,
)
from piper_kernels.attention.sparse_piper_attention._preparation import LOG2_E, PreparedOperands
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode, RoutingSummaries

_SUMMARIES = {RoutingMode.MINMAX: Summary.MINMAX, RoutingMode.MEAN: Summary.MEAN}


def prepare_sparse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mode: RoutingMode | None,
    block_lengths: Tensor | None = None,
    permuted: bool = True,
) -> tuple[PreparedOperands, RoutingSummaries | None]:
    """Smooth, rotate, quantize and summarize ``[B, S, H, D]`` operands.

    Args:
        query: FP16, BF16 or FP32 of ``Hq`` heads; features are contiguous, other strides free.
        key: The same of ``Hkv`` heads.
        value: The same.
        scale: Scale of the softmax.
        mode: How blocks are summarized; ``None``: not at all.
        block_lengths: int32 ``[blocks]``, valid rows at the front of each block; ``None``: all.
        permuted: Whether every 32 keys of value codes are permuted as ``dense`` says.

    Returns:
        Operands and summaries of the reference; rows that do not exist are zero in all codes.
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if mode is None:
        known, summaries = statistics(key, value, block_lengths), None
    else:
        summary = _SUMMARIES[mode]
        known, summaries = summarized_statistics(query, key, value, block_lengths, summary)
    parts = quantize(
        query,
        key,
        value,
        known,
        query_factor=scale * LOG2_E,
        values=Values.PER_TILE,
        permuted=permuted,
        lengths=block_lengths,
    )
    operands = PreparedOperands(
        parts.query.codes,
        parts.query.scale,
        parts.key.codes,
        parts.key.scale,
        parts.value.codes,
        parts.value.multiplier.unsqueeze(-1),
        known.value,
    )
    return operands, summaries
