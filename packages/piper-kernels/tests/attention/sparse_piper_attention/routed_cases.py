"""Operands, routes and distances that the tests of the routed Hopper kernel share."""

from dataclasses import dataclass

import torch

from piper_kernels.attention.sparse_piper_attention import reference
from piper_kernels.attention.sparse_piper_attention._blocks import (
    block_count,
    to_blocks,
    valid_rows,
)
from piper_kernels.attention.sparse_piper_attention._preparation import PreparedOperands, prepare
from piper_kernels.attention.sparse_piper_attention._routing import (
    RoutingMode,
    RoutingRequest,
    RoutingSummaries,
    summarize,
)

# Of a native backend against the quantized reference; of attention against the exact one.
MEAN_ERROR, MAX_ERROR, EXACT_ERROR = 0.003, 0.12, 0.025


def _on_cuda(tensor):
    return None if tensor is None else tensor.cuda()


@dataclass(frozen=True)
class Case:
    """A call with everything that is prepared for it, on one device."""

    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    request: RoutingRequest
    lengths: torch.Tensor | None
    prepared: PreparedOperands
    summaries: RoutingSummaries
    routes: torch.Tensor

    @property
    def rows(self):
        return self.operands[0].shape[1]

    @property
    def valid(self):
        return valid_rows(self.rows, self.lengths, self.operands[0].device)

    def cuda(self):
        """Return the case on the current CUDA device, prepared where it was."""
        return Case(
            tuple(x.cuda() for x in self.operands),
            self.request,
            _on_cuda(self.lengths),
            PreparedOperands(*(_on_cuda(x) for x in vars(self.prepared).values())),
            RoutingSummaries(*(x.cuda() for x in vars(self.summaries).values())),
            self.routes.cuda(),
        )

    def existing(self, output):
        """Return the rows of ``[B, S, H, D]`` that exist."""
        if self.lengths is None:
            return output[:, : self.rows]
        return output[:, self.valid.flatten()]

    def reference(self):
        """Return the quantized attention."""
        return reference.attend(self.prepared, self.request, self.routes, self.valid)

    def exact(self):
        """Return the attention without quantization along the same routes."""
        scale = self.operands[0].shape[3] ** -0.5
        return reference.exact_sparse_attention(*self.operands, self.request, scale, self.lengths)


def case(
    rows,
    heads=2,
    kv_heads=1,
    head_dim=64,
    *,
    amplitude=1.0,
    value_amplitude=1.0,
    batch=1,
    seed=0,
    device="cpu",
    dtype=torch.float32,
    **options,
):
    """Return a case of normal data that is in ``dtype``; the rest is for ``case_of``."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, rows, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    sizes = (amplitude, amplitude, value_amplitude)
    query, key, value = (
        (torch.randn(shape, generator=generator) * size).to(dtype).float().to(device)
        for shape, size in zip(shapes, sizes, strict=True)
    )
    return case_of(query, key, value, **options)


def case_of(
    query, key, value, *, keep=0.4, blocks=None, routed=None, lengths=None, mode=RoutingMode.MINMAX
):
    """Return the case of FP32 operands ``[B, S, H, D]``."""
    rows, heads, head_dim = query.shape[1:]
    if lengths is not None:
        lengths = torch.tensor(lengths, dtype=torch.int32, device=query.device)
    units = [round(keep * 1e6)] * heads
    request = RoutingRequest.of(units, blocks or rows // 64, mode, routed)
    valid = valid_rows(rows, lengths, query.device)
    q, k, v = (to_blocks(x, valid) for x in (query, key, value))
    summaries = summarize(q, k, valid, mode)
    needed = reference.needs_routing(request, block_count(rows))
    routes = reference.routes_of(request, summaries if needed else None, q)
    prepared = prepare(q, k, v, valid, rows, head_dim**-0.5)
    return Case((query, key, value), request, lengths, prepared, summaries, routes)


def relative(found, expected):
    """Return the relative L2 distance."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())
