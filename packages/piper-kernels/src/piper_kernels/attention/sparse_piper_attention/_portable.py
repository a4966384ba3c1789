"""The portable backend: the reference, rounded to the dtype of the output."""

import torch
from torch import Tensor

from piper_kernels.attention.sparse_piper_attention import reference
from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK, valid_rows
from piper_kernels.attention.sparse_piper_attention._preparation import PreparedOperands
from piper_kernels.attention.sparse_piper_attention._routing import RoutingRequest, RoutingSummaries


class PortableBackend:
    """Runs everywhere; the interface is described in ``_backend.SparseAttentionBackend``."""

    def support(self, device: torch.device, head_dim: int) -> tuple[bool, str]:  # noqa: ARG002
        """Return that it is usable."""
        return True, ""

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
        output = reference.sparse_attention(query, key, value, request, scale, block_lengths)
        return output.to(query.dtype).contiguous()

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
        valid = valid_rows(rows, block_lengths, operands.query.device)
        routes = reference.routes_of(request, summaries, operands.query.unflatten(2, (-1, BLOCK)))
        output = reference.attend(
            operands, request, routes, valid, query_block_offset, query_block_count
        )
        first = query_block_offset * BLOCK
        output = output[:, : (rows if query_rows is None else query_rows) - first]
        if coarse_output is not None and coarse_gate is not None:
            last = first + output.shape[1]
            coarse = coarse_output.repeat_interleave(BLOCK, dim=2)[:, :, first:last]
            gate = coarse_gate[:, first:last].to(torch.float32)
            output = output + gate * coarse.transpose(1, 2)
        return output.to(output_dtype).contiguous() if out is None else out.copy_(output)
