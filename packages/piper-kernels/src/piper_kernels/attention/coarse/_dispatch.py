"""Coarse attention of prepared summaries: kernels where Triton runs, else the reference."""

from torch import Tensor

from piper_kernels._triton.runtime import supports_device
from piper_kernels.attention.coarse import reference
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode, RoutingSummaries


def coarse_output(
    summaries: RoutingSummaries,
    pooled_value: Tensor,
    mode: RoutingMode,
    coarse_key_blocks: int,
    coarse_scale: float,
) -> Tensor:
    """Return the coarse attention of all query blocks, FP32 ``[B, H, query blocks, D]``.

    Args:
        summaries: Of all blocks; queries may be a range of them.
        pooled_value: FP32 ``[B, H, blocks, D]``.
        mode: What the summaries are.
        coarse_key_blocks: Leading key blocks that are attended to.
        coarse_scale: Positive factor of the scores.
    """
    arguments = (summaries, pooled_value, mode, coarse_key_blocks, coarse_scale)
    if supports_device(summaries.query.device):
        from piper_kernels.attention.coarse import _triton_backend

        return _triton_backend.coarse_output(*arguments)
    return reference.coarse_output(*arguments)
