"""Chains of operators from one floating input to attention, and what they should compute."""

import torch
from projection_operands import operands
from projection_oracle import attention, exists, normalize_and_rotate, project

import piper_kernels.attention.coarse._ops
import piper_kernels.attention.piper_attention._ops
import piper_kernels.fusions.convrot_int8_piper._ops
import piper_kernels.fusions.convrot_int8_sparse_piper._ops
import piper_kernels.fusions.convrot_int8_sparse_piper._ops_value  # noqa: F401

P = torch.ops.piper_kernels


class Layer:
    """Query, key and value projections of one input ``[B, S, F]``."""

    def __init__(self, rows, *, heads=2, kv_heads=None, device="cpu", **changes):
        def part(seed, count):
            case = operands(rows, heads=count, seed=seed, **changes)
            return case.to(device)

        kv_heads = heads if kv_heads is None else kv_heads
        self.query, self.key, self.value = (
            part(1, heads),
            part(2, kv_heads),
            part(3, kv_heads),
        )
        self.lengths = self.query.lengths
        self.rows, self.width = rows, self.query.projection.head_dim
        self.scale = self.width**-0.5
        batch, features = changes.get("batch", 1), self.query.projection.qdata.shape[1]
        x = torch.randn(batch, rows, features, generator=torch.Generator().manual_seed(4))
        x += torch.linspace(-1, 1, rows)[:, None]  # so that blocks differ
        if self.lengths is not None:
            x[:, ~exists(rows, self.lengths.cpu())] = 1e4  # padding may hold anything
        self.inputs = P.convrot_int8_prepare_input(x.to(device), features)

    def operands_of(self, part):
        p, t = part.projection, part.transform
        rows = (*self.inputs, p.qdata, p.scale, t.weight, t.cos, t.sin, t.eps)
        return rows, {"bias": p.bias, "head_dim": p.head_dim}

    def values(self, name, is_causal=False):
        p = self.value.projection
        mean = None
        if not is_causal:
            mean = P.convrot_int8_dequantized_input_mean(*self.inputs, self.lengths)
        lengths = [self.lengths] if "sparse" in name else []
        return getattr(P, f"convrot_int8_{name}")(
            *self.inputs, mean, p.qdata, p.scale, *lengths, bias=p.bias, head_dim=p.head_dim
        )

    def sparse_rows(self, mode):
        rows, named = self.operands_of(self.query)
        query = P.convrot_int8_sparse_piper_project_query(
            *rows, self.scale, mode, self.lengths, **named
        )
        rows, named = self.operands_of(self.key)
        key = P.convrot_int8_sparse_piper_project_key(*rows, mode, self.lengths, **named)
        return *query, *key

    def sparse(self, units, blocks, mode, query_blocks=None, dtype=torch.float32):
        return P.sparse_piper_attention_from_quantized(
            *self.sparse_rows(mode), *self.values("sparse_piper_project_value"), units, blocks,
            self.rows, mode, self.lengths, query_blocks, output_dtype=dtype,
        )  # fmt: skip

    def coarse(self, units, blocks, mode, gate):
        values = self.values("sparse_piper_project_value_with_block_means")
        return P.sparse_piper_attention_with_coarse_residual_from_quantized(
            *self.sparse_rows(mode), *values, gate, units, blocks, self.rows, mode, 0.125,
            self.lengths, output_dtype=torch.float32,
        )  # fmt: skip

    def dense(self, is_causal=False, dtype=torch.float32):
        rows, named = self.operands_of(self.query)
        query = P.convrot_int8_piper_project_query(*rows, self.scale, **named)
        rows, named = self.operands_of(self.key)
        key = P.convrot_int8_piper_project_key(*rows, **named)
        value = self.values("piper_project_value", is_causal)
        return P.piper_attention_from_quantized(
            *query, *key, *value, self.rows, self.rows, is_causal, dtype
        )

    def heads(self):
        """Return exact queries, keys and values, float64 ``[B, H, S, D]``."""
        inputs = type(self.query.inputs)(*[x.cpu() for x in self.inputs])
        query, key = (
            normalize_and_rotate(project(inputs, part.projection), part.transform)
            for part in (self.query.to("cpu"), self.key.to("cpu"))
        )
        return query, key, project(inputs, self.value.to("cpu").projection)

    def exact(self, is_causal=False):
        return attention(*self.heads(), self.scale, is_causal)


def relative_error(actual, expected):
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).norm() / expected.norm())
