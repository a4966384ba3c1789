"""The sparse Piper backend in plain Triton, for sm_8x, sm_12x and RDNA4."""

from typing import Any

import torch
from torch import Tensor

from piper_kernels._triton.runtime import NO_TRITON, triton_is_installed
from piper_kernels._triton.targets import accelerator_target
from piper_kernels.attention._mixed_sign.plan import AttentionPlan, sparse_plan
from piper_kernels.attention.sparse_piper_attention import _native
from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK
from piper_kernels.attention.sparse_piper_attention._preparation import PreparedOperands
from piper_kernels.attention.sparse_piper_attention._routing import RoutingRequest, RoutingSummaries


class MixedSignBackend:
    """The interface is described in ``_backend.SparseAttentionBackend``."""

    def support(self, device: torch.device, head_dim: int) -> tuple[bool, str]:  # noqa: ARG002
        """Return whether the target has mixed-sign products that Triton can be made to use."""
        target = accelerator_target(device)
        if target is None:
            return False, f"mixed-sign products need a CUDA or ROCm device, got {device}"
        if not triton_is_installed():
            return False, NO_TRITON
        plan, reason = sparse_plan(target)
        return plan is not None, reason

    def value_sums(self, value: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return nothing."""
        return None

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        request: RoutingRequest,
        scale: float,
        block_lengths: Tensor | None,
    ) -> Tensor:
        """Return the attention of floating operands."""
        operands, summaries = _native.prepare(query, key, value, request, scale, block_lengths)
        rows = query.shape[1]
        return _attend(operands, summaries, request, rows, block_lengths, query.dtype)

    def attention_from_quantized(
        self,
        operands: PreparedOperands,
        summaries: RoutingSummaries,
        request: RoutingRequest,
        rows: int,
        block_lengths: Tensor | None,
        output_dtype: torch.dtype,
        *,
        coarse_output: Tensor | None = None,
        coarse_gate: Tensor | None = None,
        query_block_offset: int = 0,
        query_block_count: int | None = None,
        query_rows: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of prepared operands."""
        return _attend(
            operands,
            summaries,
            request,
            rows,
            block_lengths,
            output_dtype,
            coarse_output=coarse_output,
            coarse_gate=coarse_gate,
            query_block_offset=query_block_offset,
            query_block_count=query_block_count,
            query_rows=query_rows,
            out=out,
        )


def _attend(
    operands: PreparedOperands,
    summaries: RoutingSummaries | None,
    request: RoutingRequest,
    rows: int,
    block_lengths: Tensor | None,
    dtype: torch.dtype,
    **window: Any,
) -> Tensor:
    """Route where blocks are left out; without routes all blocks are visited in order."""
    from piper_kernels.attention._mixed_sign._launch import attend_sparse

    device = operands.query.device
    routes, table = _native.route(request, summaries, operands.query.shape[2] // BLOCK)
    return attend_sparse(
        operands,
        request,
        routes,
        table,
        rows=rows,
        block_lengths=block_lengths,
        dtype=dtype,
        plan=_plan(device),
        **window,
    )


def _plan(device: torch.device) -> AttentionPlan:
    target = accelerator_target(device)
    plan = None if target is None else sparse_plan(target)[0]
    if plan is None:
        raise RuntimeError(f"the mixed-sign backend was called for {device}")
    return plan
