"""Selection of the code that executes sparse Piper attention on a device."""

from typing import Protocol

import torch
from torch import Tensor

from piper_kernels.attention.sparse_piper_attention._hopper import HopperBackend
from piper_kernels.attention.sparse_piper_attention._mixed_sign import MixedSignBackend
from piper_kernels.attention.sparse_piper_attention._portable import PortableBackend
from piper_kernels.attention.sparse_piper_attention._preparation import PreparedOperands
from piper_kernels.attention.sparse_piper_attention._routing import RoutingRequest, RoutingSummaries


class SparseAttentionBackend(Protocol):
    """What an execution backend provides; shapes and maths are those of the reference."""

    def support(self, device: torch.device, head_dim: int) -> tuple[bool, str]:
        """Return whether the backend runs on a device, and the reason when it does not."""
        ...

    def value_sums(self, value: Tensor) -> Tensor | None:
        """Return what the attention needs of value codes besides them, if anything.

        Callers that attend to the same values several times make it once.
        """
        ...

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        request: RoutingRequest,
        scale: float,
        block_lengths: Tensor | None,
    ) -> Tensor:
        """Return the attention of floating operands ``[B, S, H, D]`` in their dtype."""
        ...

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
        """Return the attention of prepared operands, ``[B, rows of the range, Hq, D]``.

        Args:
            operands: Codes and scales of the whole sequence; the queries may be a window of it.
            summaries: Routing summaries of the same queries and of all keys.
            request: Budgets and routing of the queries.
            rows: Keys that exist, or all of them with ``block_lengths``.
            block_lengths: int32 ``[blocks]``, or ``None``.
            output_dtype: Dtype of the result, rounded to once.
            coarse_output: FP32 ``[B, Hq, query blocks, D]``; added to each row of its block,
                times the gate, in FP32. ``None``: nothing is added.
            coarse_gate: Floating ``[B, queries, Hq, D]``, given with ``coarse_output``.
            query_block_offset: First query block to compute.
            query_block_count: Query blocks to compute; ``None``: all that follow.
            query_rows: Queries of a window; ``None``: as many as ``rows``.
            out: Contiguous room for the result; ``None``: it is allocated.
        """
        ...


BACKENDS: tuple[SparseAttentionBackend, ...] = (
    HopperBackend(),
    MixedSignBackend(),
    PortableBackend(),
)  # in order of preference


def select_backend(device: torch.device, head_dim: int) -> SparseAttentionBackend:
    """Return the backend that executes the operators on a device.

    Operators ask at execution time, so a compiled graph follows a change of backend.

    Raises:
        RuntimeError: None does; the message says why.
    """
    reasons = []
    for backend in BACKENDS:
        usable, reason = backend.support(device, head_dim)
        if usable:
            return backend
        reasons.append(reason)
    raise RuntimeError(f"no backend of sparse Piper Attention is usable: {'; '.join(reasons)}")
