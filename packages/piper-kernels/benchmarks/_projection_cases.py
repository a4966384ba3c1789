"""Cases and providers of the benchmark of projections to quantized attention operands."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import piper_kernels.attention.piper_attention._ops
import piper_kernels.fusions.convrot_int8_piper._ops
import piper_kernels.fusions.convrot_int8_sparse_piper._ops
import piper_kernels.fusions.convrot_int8_sparse_piper._ops_value  # noqa: F401
from piper_kernels.attention.sparse_piper_attention import _native, _preparation
from piper_kernels.attention.sparse_piper_attention._blocks import to_blocks, valid_rows
from piper_kernels.attention.sparse_piper_attention._routing import (
    RoutingMode,
    RoutingRequest,
    summarize,
)
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

OPS = torch.ops.piper_kernels
GROUP, EPS = 256, 1e-6
LABELS = {
    "sparse": "queries, keys and values, fused, sparse",
    "dense": "queries, keys and values, fused, dense",
    "unfused": "linears, norm and rotary embedding, sparse preparation",
    "query": "queries, fused, sparse",
    "key": "keys, fused, sparse",
    "value": "values, fused, sparse",
    "product": "product of the queries alone, FP32",
}


@dataclass(frozen=True)
class ProjectionCase:
    """Projections of ``rows`` rows of ``features`` to ``heads`` heads of ``head_dim``."""

    rows: int
    features: int
    heads: int
    head_dim: int

    @property
    def name(self) -> str:
        """Sizes in tables."""
        return f"{self.rows} rows, {self.features} features, {self.heads} heads of {self.head_dim}"

    @property
    def operations(self) -> int:
        """Operations of the product of one projection."""
        return 2 * self.rows * self.features * self.heads * self.head_dim


FULL = (
    ProjectionCase(16_384, 4096, 32, 128),
    ProjectionCase(32_768, 4096, 32, 128),
    ProjectionCase(16_384, 2048, 32, 64),
)
QUICK = (ProjectionCase(130, 256, 2, 64),)


def normalize_and_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads ``[B, S, H, D]`` in the dtype of ``x``, rounded where a model rounds."""
    heads = x.unflatten(-1, (-1, weight.shape[0]))
    y = heads.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * weight
    y = y.to(x.dtype)
    low, high = y.chunk(2, -1)
    cos, sin = (table[:, None].to(x.dtype) for table in (cos, sin))
    return y * cos + torch.cat((-high, low), -1) * sin


class Projections:
    """Random weights and inputs of a case; inputs are prepared already.

    Args:
        case: Sizes.
        device: Where everything is.
        sets: Inputs to rotate through.
    """

    def __init__(self, case: ProjectionCase, device: torch.device, sets: int) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator)

        self.case, outputs = case, case.heads * case.head_dim
        dense = [normal(outputs, case.features) * case.features**-0.5 for _ in range(3)]
        weights = [ConvRotInt8Tensor.from_hp(w.bfloat16(), group_size=GROUP) for w in dense]
        self.weights = [(weight.qdata, weight.scale) for weight in weights]
        self.norm = 1 + 0.1 * normal(case.head_dim)
        frequencies = 1e4 ** (-torch.arange(case.head_dim // 2, device=device) * 2 / case.head_dim)
        angles = torch.outer(torch.arange(case.rows, device=device), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        shape = (1, case.rows, case.features)
        self.inputs = [
            OPS.convrot_int8_prepare_input(normal(*shape).bfloat16(), GROUP) for _ in range(sets)
        ]
        self._rotated = normalize_and_rotate
        if device.type == "cuda":  # for each length on its own, as fast as Inductor gets
            self._rotated = torch.compile(normalize_and_rotate, dynamic=False)

    def _rows(self, index: int, part: int) -> tuple:
        tables = (self.norm, self.cos, self.sin, EPS)
        return (*self.inputs[index], *self.weights[part], *tables)

    @property
    def _scale(self) -> float:
        return self.case.head_dim**-0.5

    def query(self, index: int) -> tuple[Tensor, ...]:
        """Return sparse queries."""
        rows = self._rows(index, 0)
        return OPS.convrot_int8_sparse_piper_project_query(*rows, self._scale, RoutingMode.MINMAX)

    def key(self, index: int) -> tuple[Tensor, ...]:
        """Return sparse keys."""
        return OPS.convrot_int8_sparse_piper_project_key(*self._rows(index, 1), RoutingMode.MINMAX)

    def value(self, index: int) -> tuple[Tensor, ...]:
        """Return sparse values; the mean of the inputs is part of it."""
        mean = OPS.convrot_int8_dequantized_input_mean(*self.inputs[index])
        return OPS.convrot_int8_sparse_piper_project_value(
            *self.inputs[index], mean, *self.weights[2], head_dim=self.case.head_dim
        )

    def sparse(self, index: int) -> tuple[Tensor, ...]:
        """Return all operands of sparse attention."""
        return *self.query(index), *self.key(index), *self.value(index)

    def dense(self, index: int) -> tuple[Tensor, ...]:
        """Return all operands of dense attention."""
        query = OPS.convrot_int8_piper_project_query(*self._rows(index, 0), self._scale)
        key = OPS.convrot_int8_piper_project_key(*self._rows(index, 1))
        mean = OPS.convrot_int8_dequantized_input_mean(*self.inputs[index])
        value = OPS.convrot_int8_piper_project_value(
            *self.inputs[index], mean, *self.weights[2], head_dim=self.case.head_dim
        )
        return *query, *key, *value

    def product(self, index: int, part: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a projection alone, ``[1, rows, heads * head_dim]``."""
        return OPS.convrot_int8_linear_prepared(
            *self.inputs[index], *self.weights[part], None, dtype
        )

    def unfused(self, index: int) -> tuple[Tensor, ...]:
        """Return all operands of sparse attention from separate operators in bfloat16."""
        query, key, value = (self.product(index, part, torch.bfloat16) for part in range(3))
        tables = (self.norm, self.cos, self.sin)
        query, key = self._rotated(query, *tables), self._rotated(key, *tables)
        value = value.unflatten(-1, (-1, self.case.head_dim))
        # Some blocks are left out, so that summaries are needed.
        units = (500_000,) * self.case.heads
        request = RoutingRequest(units, self.case.rows // 64, RoutingMode.MINMAX)
        if query.is_cuda:
            operands, summaries = _native.prepare(query, key, value, request, self._scale, None)
            assert summaries is not None, "blocks are scored"
        else:
            valid = valid_rows(self.case.rows, None, query.device)
            q, k, v = (to_blocks(x, valid) for x in (query, key, value))
            operands = _preparation.prepare(q, k, v, valid, self.case.rows, self._scale)
            summaries = summarize(q, k, valid, RoutingMode.MINMAX)
        o = operands
        parts = (o.query, o.query_scale, summaries.query, o.key, o.key_scale, summaries.key)
        return *parts, summaries.key_aux, o.value, o.value_multiplier, o.value_mean

    def providers(self) -> dict[str, Callable[[int], object]]:
        """Return what is timed, by the names of ``LABELS``."""
        return {name: getattr(self, name) for name in LABELS}

    def attention(self, name: str) -> Tensor | None:
        """Return the attention to all keys of what a provider made of the first input."""
        rows, kind = self.case.rows, torch.float32
        if name == "dense":
            output = OPS.piper_attention_from_quantized(*self.dense(0), rows, rows, False, kind)
            return output.transpose(1, 2)
        if name not in ("sparse", "unfused"):
            return None
        operands = self.sparse(0) if name == "sparse" else self.unfused(0)
        units = [1_000_000] * self.case.heads
        return OPS.sparse_piper_attention_from_quantized(
            *operands, units, rows // 64, rows, RoutingMode.MINMAX, output_dtype=kind
        )
