"""The sparse Piper backend for Hopper: INT8 matrix instructions, written in Gluon."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from piper_kernels._triton.targets import accelerator_target
from piper_kernels.attention._backends import AttentionRequest
from piper_kernels.attention._hopper import hopper_support
from piper_kernels.attention.sparse_piper_attention import _native
from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK, block_count
from piper_kernels.attention.sparse_piper_attention._preparation import PreparedOperands
from piper_kernels.attention.sparse_piper_attention._routing import RoutingRequest, RoutingSummaries

if TYPE_CHECKING:
    from piper_kernels.attention._sm90_kernels.routed_launch import Routes


class HopperBackend:
    """Prepares, routes and attends in kernels; the interface is that of ``_backend``."""

    def support(self, device: torch.device, head_dim: int) -> tuple[bool, str]:
        """Return whether the device is a Hopper and Triton can express its instructions."""
        request = AttentionRequest(accelerator_target(device), head_dim, is_causal=False)
        usable, reason = hopper_support(request)
        return usable, reason and f"Hopper: {reason}"

    def value_sums(self, value: Tensor) -> Tensor | None:
        """Return 128 times the sums of the codes of tiles."""
        from piper_kernels.attention._sm90_kernels.routed_launch import tile_sums

        return tile_sums(value)

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
        from piper_kernels.attention._sm90_kernels.routed_launch import attend, tile_sums

        rows = query.shape[1]
        operands, summaries = _native.prepare(query, key, value, request, scale, block_lengths)
        routes = _routes(request, summaries, block_count(rows))
        sums = tile_sums(operands.value)
        return attend(operands, sums, routes, rows, block_lengths, query.dtype)

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
        from piper_kernels.attention._sm90_kernels.routed_launch import (
            CoarseBranch,
            attend,
            tile_sums,
        )

        coarse = None
        if coarse_output is not None and coarse_gate is not None:
            gate = coarse_gate if coarse_gate.stride(3) == 1 else coarse_gate.contiguous()
            coarse = CoarseBranch(coarse_output.contiguous(), gate)
        return attend(
            operands,
            tile_sums(operands.value) if operands.value_sums is None else operands.value_sums,
            _routes(request, summaries, operands.query.shape[2] // BLOCK),
            rows,
            block_lengths,
            output_dtype,
            coarse=coarse,
            first_block=query_block_offset,
            blocks=query_block_count,
            query_rows=query_rows,
            out=out,
        )


def _routes(request: RoutingRequest, summaries: RoutingSummaries | None, blocks: int) -> "Routes":
    from piper_kernels.attention._sm90_kernels.routed_launch import Routes

    routes, table = _native.route(request, summaries, blocks)
    return Routes(routes, table, request.sparse_key_blocks)
