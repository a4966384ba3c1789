"""The coarse residual on accelerators, in kernels. Importing needs Triton."""

# pyright: reportArgumentType=false, reportCallIssue=false

import torch
from torch import Tensor

from piper_kernels._triton.runtime import launch_guard
from piper_kernels._triton.targets import accelerator_target, dot_precision
from piper_kernels.attention.coarse._kernels import attend_kernel, gate_kernel, summarize_kernel
from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK, block_count
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode, RoutingSummaries

_GATE_ROWS = 32
_ATTEND_TILE = {"ROWS": 16, "COLUMNS": 32, "DEPTH": 32}


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
    output = coarse_output(summaries, pooled, mode, coarse_key_blocks, coarse_scale)
    return gated_residual(output, gate)


def coarse_output(
    summaries: RoutingSummaries,
    pooled_value: Tensor,
    mode: RoutingMode,
    coarse_key_blocks: int,
    coarse_scale: float,
) -> Tensor:
    """Return the coarse attention of all query blocks; arguments are those of the reference.

    No scores are stored, and a query block has the same result whichever others there are.
    """
    query, key = summaries.query.contiguous(), summaries.key.contiguous()
    batch, heads, blocks, head_dim = query.shape
    minmax = mode is RoutingMode.MINMAX
    out = torch.empty_like(query)
    if not out.numel():
        return out
    precision = "ieee" if accelerator_target(query.device) is None else dot_precision(query.device)
    with launch_guard(query.device):
        attend_kernel[(-(-blocks // _ATTEND_TILE["ROWS"]), batch * heads)](
            query, key, summaries.key_aux.contiguous() if minmax else key,
            pooled_value.contiguous(), out, blocks, key.shape[2], coarse_key_blocks, coarse_scale,
            D=head_dim, MINMAX=minmax, PRECISION=precision, **_ATTEND_TILE,
        )  # fmt: skip
    return out


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
