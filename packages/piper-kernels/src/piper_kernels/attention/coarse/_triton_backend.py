"""The coarse residual on accelerators: two kernels around small FP32 products."""

# pyright: reportArgumentType=false, reportCallIssue=false

import torch
from torch import Tensor

from piper_kernels._triton.runtime import launch_guard
from piper_kernels.attention.coarse import reference
from piper_kernels.attention.coarse._kernels import gate_kernel, summarize_kernel
from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK, block_count
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode, RoutingSummaries

_GATE_ROWS = 32


def coarse_residual(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    coarse_key_blocks: int,
    coarse_scale: float,
    mode: RoutingMode,
    block_lengths: Tensor | None,
) -> Tensor:
    """Return the gated coarse attention; arguments and result are those of the reference."""
    summaries, pooled = summarize(query, key, value, mode, block_lengths)
    output = reference.coarse_output(summaries, pooled, mode, coarse_key_blocks, coarse_scale)
    return gated_residual(output, gate)


def summarize(
    query: Tensor, key: Tensor, value: Tensor, mode: RoutingMode, block_lengths: Tensor | None
) -> tuple[RoutingSummaries, Tensor]:
    """Return the summaries and the means of value blocks of ``[B, S, H, D]`` operands."""
    batch, rows, heads, head_dim = query.shape
    blocks = block_count(rows)
    shape = (batch, heads, blocks, head_dim)
    minmax = mode is RoutingMode.MINMAX
    q, k, aux, pooled = (
        torch.empty(
            (*shape[:2], 0, head_dim) if index == 2 and not minmax else shape,
            dtype=torch.float32,
            device=query.device,
        )
        for index in range(4)
    )
    with launch_guard(query.device):
        summarize_kernel[(blocks, batch * heads, 3)](
            query,
            key,
            value,
            q if block_lengths is None else block_lengths,
            q,
            k,
            aux if minmax else k,
            pooled,
            rows,
            heads,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            D=head_dim,
            MINMAX=minmax,
            HAS_LENGTHS=block_lengths is not None,
        )
    return RoutingSummaries(q, k, aux), pooled


def gated_residual(coarse_output: Tensor, gate: Tensor) -> Tensor:
    """Return each coarse row times the gate of its 64 rows; see the reference."""
    batch, rows, heads, head_dim = gate.shape
    blocks = block_count(rows)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    with launch_guard(gate.device):
        gate_kernel[(blocks * (BLOCK // _GATE_ROWS), batch * heads)](
            coarse_output.contiguous(),
            gate,
            out,
            rows,
            heads,
            blocks,
            *gate.stride()[:3],
            D=head_dim,
            ROWS=_GATE_ROWS,
        )
    return out
