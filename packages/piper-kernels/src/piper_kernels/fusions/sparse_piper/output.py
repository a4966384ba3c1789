"""Sparse Piper attention by windows of queries, each of which is projected at once.

Queries are there already or are projected window by window; keys and values are there for the
whole sequence. Nothing of the size of the queries, the routes or the attention exists as a whole.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from piper_kernels.attention.coarse._dispatch import coarse_output
from piper_kernels.attention.sparse_piper_attention._backend import (
    SparseAttentionBackend,
    select_backend,
)
from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK, block_count
from piper_kernels.attention.sparse_piper_attention._preparation import (
    QUERY_GROUP,
    PreparedOperands,
)
from piper_kernels.attention.sparse_piper_attention._routing import RoutingRequest, RoutingSummaries
from piper_kernels.fusions.attention.output import Gates, OutputLinear, WindowedOutput
from piper_kernels.fusions.attention.windows import balanced_windows


class Queries(Protocol):
    """Where the queries of a window come from."""

    @property
    def tensors(self) -> list[Tensor]:
        """What they are made of."""
        ...

    def window(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scales and summaries of a range of rows that starts a block."""
        ...


@dataclass(frozen=True)
class PreparedQueries:
    """Queries of the whole sequence.

    Attributes:
        codes: int8 ``[B, H, R, D]``.
        scale: FP32 ``[B, H, R / 32]``.
        summary: FP32 ``[B, H, R / 64, D]``.
    """

    codes: Tensor
    scale: Tensor
    summary: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """The queries."""
        return [self.codes, self.scale, self.summary]

    def window(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return contiguous copies of a range of rows, in whole blocks."""
        first, last = rows.start // BLOCK, block_count(rows.stop)
        groups = BLOCK // QUERY_GROUP
        return (
            self.codes[:, :, first * BLOCK : last * BLOCK].contiguous(),
            self.scale[:, :, first * groups : last * groups].contiguous(),
            self.summary[:, :, first:last].contiguous(),
        )


@dataclass(frozen=True)
class KeysAndValues:
    """Keys and values of the whole sequence, ``R`` rows in blocks of 64.

    Attributes:
        key: int8 ``[B, Hkv, R, D]``.
        key_scale: FP32 ``[B, Hkv, R / 64]``.
        key_summary: FP32 ``[B, Hkv, R / 64, D]``.
        key_aux: FP32 ``[B, Hkv, R / 64 or 0, D]``.
        value: int8 ``[B, Hkv, D, R]``.
        value_multiplier: FP32 ``[B, Hkv, R / 64, 1]``.
        value_mean: FP32 ``[B, Hkv, D]``.
    """

    key: Tensor
    key_scale: Tensor
    key_summary: Tensor
    key_aux: Tensor
    value: Tensor
    value_multiplier: Tensor
    value_mean: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return list(vars(self).values())

    def with_queries(
        self, codes: Tensor, scale: Tensor, summary: Tensor, value_sums: Tensor | None = None
    ) -> tuple[PreparedOperands, RoutingSummaries]:
        """Return the operands and summaries of an attention from some queries."""
        operands = PreparedOperands(
            codes,
            scale,
            self.key,
            self.key_scale,
            self.value,
            self.value_multiplier,
            self.value_mean,
            value_sums,
        )
        return operands, RoutingSummaries(summary, self.key_summary, self.key_aux)


@dataclass(frozen=True)
class CoarseBranch:
    """What is added to the attention of a window before it is rounded.

    Attributes:
        block_mean: FP32 ``[B, H, R / 64, D]``, means of value blocks.
        scale: Factor of the scores.
        key_blocks: Leading key blocks that are attended to.
        gates: Factor of the result.
    """

    block_mean: Tensor
    scale: float
    key_blocks: int
    gates: Gates


@dataclass(frozen=True)
class SparseOutput:
    """An attention whose result only its projection reads.

    Attributes:
        queries: Where queries come from.
        keys: Keys and values.
        request: Budgets and routing of the sequence.
        rows: Rows of the sequence that exist, or all of them with ``block_lengths``.
        block_lengths: int32 ``[blocks]``, or ``None``.
        coarse: The branch that is added, or ``None``.
        dtype: Dtype that the attention is rounded to.
    """

    queries: Queries
    keys: KeysAndValues
    request: RoutingRequest
    rows: int
    block_lengths: Tensor | None
    coarse: CoarseBranch | None
    dtype: torch.dtype

    def project(
        self, linear: OutputLinear, output: Tensor, window_rows: int, multiple: int = BLOCK
    ) -> Tensor:
        """Write the projection ``[B, rows, N]`` of the attention and return it.

        Args:
            linear: The projection.
            output: Room for the result.
            window_rows: Most rows of a window.
            multiple: What windows are multiples of, 64 or a multiple of it.
        """
        heads, head_dim = len(self.request.units), self.keys.key.shape[3]
        shape = (output.shape[0], self.rows, heads, head_dim)
        windows = balanced_windows(self.rows, window_rows, multiple)
        gates = None if self.coarse is None else self.coarse.gates
        touched = [*self.queries.tensors, *self.keys.tensors]
        touched += [] if self.block_lengths is None else [self.block_lengths]
        touched += [] if self.coarse is None else [self.coarse.block_mean]
        runner = WindowedOutput(shape, self.dtype, windows, linear, gates)
        return runner.run(self.attend, output, touched)

    def attend(self, window: slice, out: Tensor, gate: Tensor | None) -> None:
        """Write the attention of a window of queries, ``[B, rows, H, D]``."""
        queries = self.queries.window(window)
        operands, summaries = self.keys.with_queries(*queries, self._value_sums)
        request, added = self._request(window), None
        if self.coarse is not None:
            added = coarse_output(
                summaries,
                self.coarse.block_mean,
                request.mode,
                self.coarse.key_blocks,
                self.coarse.scale,
            )
        self._backend.attention_from_quantized(
            operands,
            summaries,
            request,
            self.rows,
            self.block_lengths,
            self.dtype,
            coarse_output=added,
            coarse_gate=gate,
            query_rows=window.stop - window.start,
            out=out,
        )

    @cached_property
    def _backend(self) -> SparseAttentionBackend:
        return select_backend(self.keys.key.device, self.keys.key.shape[3])

    @cached_property
    def _value_sums(self) -> Tensor | None:
        return self._backend.value_sums(self.keys.value)

    def _request(self, window: slice) -> RoutingRequest:
        """Return the request of a window, whose first blocks may be routed."""
        routed = self.request.sparse_query_blocks
        if routed is None:
            return self.request
        first, last = window.start // BLOCK, block_count(window.stop)
        return replace(self.request, sparse_query_blocks=min(max(routed - first, 0), last - first))
