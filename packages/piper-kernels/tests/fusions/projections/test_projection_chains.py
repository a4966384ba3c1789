"""Chains of projections and attention against exact attention and against unfused operators."""

import pytest
import torch
from process_state import no_synchronization
from projection_chains import Layer, P, relative_error
from projection_oracle import exists

from piper_kernels.attention.coarse import reference as coarse_reference
from piper_kernels.attention.piper_attention._backend import PortableBackend
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode

MINMAX, MEAN = 0, 1
HALF_AND_ALL = [500_000, 1_000_000]
BOUND = 0.025


def token_major(heads):
    return [x.float().transpose(1, 2).contiguous() for x in heads]


@pytest.mark.parametrize(("rows", "batch"), [(65, 1), (127, 1), (129, 2), (193, 1)])
@pytest.mark.parametrize("mode", [MINMAX, MEAN])
def test_sparse_attention_of_ragged_sequences(rows, batch, mode):
    layer = Layer(rows, batch=batch, head_dim=64, rotary=48)
    blocks = rows // 64
    output = layer.sparse(HALF_AND_ALL, blocks, mode)
    unfused = P.sparse_piper_attention(
        *token_major(layer.heads()), HALF_AND_ALL, blocks, layer.scale, mode
    )
    assert output.shape == unfused.shape
    assert relative_error(output, unfused) < BOUND
    full = layer.sparse([1_000_000] * 2, blocks, mode)
    assert relative_error(full, layer.exact().transpose(1, 2)) < BOUND


@pytest.mark.parametrize("lengths", [[64, 17, 51], [33, 64, 11]])
def test_blocks_with_lengths(lengths):
    layer = Layer(192, lengths=lengths)
    output = layer.sparse(HALF_AND_ALL, 2, MINMAX, query_blocks=2)
    kept = exists(192, layer.lengths)
    unfused = P.sparse_piper_attention(
        *token_major(layer.heads()), HALF_AND_ALL, 2, layer.scale, MINMAX, layer.lengths, 2
    )
    assert output[:, kept].isfinite().all()
    assert relative_error(output[:, kept], unfused[:, kept]) < BOUND


@pytest.mark.parametrize("mode", [MINMAX, MEAN])
def test_coarse_residual(mode):
    layer = Layer(193, head_dim=64, rotary=64)
    gate = torch.randn(1, 193, 2, 64, generator=torch.Generator().manual_seed(9))
    output = layer.coarse(HALF_AND_ALL, 2, mode, gate)
    query, key, value = token_major(layer.heads())
    fine = P.sparse_piper_attention(query, key, value, HALF_AND_ALL, 2, layer.scale, mode)
    residual = coarse_reference.coarse_residual(
        query, key, value, gate, 4, 0.125, RoutingMode(mode), None
    )
    assert relative_error(output, fine + residual) < BOUND
    assert relative_error(output, fine) > BOUND
    without = layer.coarse(HALF_AND_ALL, 2, mode, torch.zeros_like(gate))
    assert torch.equal(without, layer.sparse(HALF_AND_ALL, 2, mode))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(2, 2, 65), (4, 2, 129), (3, 1, 1)])
def test_dense_attention(heads, kv_heads, rows, is_causal):
    layer = Layer(rows, heads=heads, kv_heads=kv_heads, head_dim=64, rotary=32)
    output = layer.dense(is_causal)
    assert output.shape == (1, heads, rows, 64)
    assert relative_error(output, layer.exact(is_causal)) < BOUND


def test_values_that_share_a_scale_where_the_backend_is_meant_for_it(monkeypatch):
    layer = Layer(193, head_dim=64, rotary=64)
    monkeypatch.setattr(PortableBackend, "values_per_tile", True)
    assert relative_error(layer.dense(), layer.exact()) < BOUND
    assert layer.values("piper_project_value")[1].shape == (1, 2, 4)
    assert relative_error(layer.dense(is_causal=True), layer.exact(is_causal=True)) < BOUND


def test_values_that_do_not_vary_are_exact():
    layer = Layer(193, head_dim=64, rotary=64)
    layer.value.projection.qdata.zero_()
    bias = layer.value.projection.bias.view(1, 1, 2, 64)
    assert torch.equal(layer.sparse(HALF_AND_ALL, 3, MINMAX), bias.expand(1, 193, 2, 64))
    expected = bias.transpose(1, 2).expand(1, 2, 193, 64)
    assert torch.equal(layer.dense(), expected)


def test_chains_are_deterministic():
    layer = Layer(193)
    first = layer.sparse(HALF_AND_ALL, 2, MINMAX, dtype=torch.bfloat16)
    assert torch.equal(first, layer.sparse(HALF_AND_ALL, 2, MINMAX, dtype=torch.bfloat16))
    assert first.dtype == torch.bfloat16


def test_one_graph_for_changed_lengths_and_budgets():
    layers = [Layer(rows, head_dim=64, rotary=64) for rows in (193, 321)]
    query, key, value = (
        (part.projection.qdata, part.projection.scale)
        for part in (layers[0].query, layers[0].key, layers[0].value)
    )
    graphs = []

    def chain(qdata, scale, cos, sin, blocks):
        x, tables, named = (qdata, scale), (None, cos, sin, 1e-5), {"head_dim": 64}
        mean = P.convrot_int8_dequantized_input_mean(*x)
        return P.sparse_piper_attention_from_quantized(
            *P.convrot_int8_sparse_piper_project_query(*x, *query, *tables, 0.1, MINMAX, **named),
            *P.convrot_int8_sparse_piper_project_key(*x, *key, *tables, MINMAX, **named),
            *P.convrot_int8_sparse_piper_project_value(*x, mean, *value, **named),
            HALF_AND_ALL, blocks, qdata.shape[1], MINMAX,
        )  # fmt: skip

    def count(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(chain, backend=count, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for layer, blocks in zip(layers, (2, 4), strict=True):
            arguments = *layer.inputs, layer.query.transform.cos, layer.query.transform.sin, blocks
            assert torch.equal(compiled(*arguments), chain(*arguments))
    assert len(graphs) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("mode", [MINMAX, MEAN])
    def test_sparse_chain(self, head_dim, mode):
        layer = Layer(577, heads=4, head_dim=head_dim, rotary=head_dim - 16, device="cuda")
        units = [300_000, 500_000, 700_000, 1_000_000]
        output = layer.sparse(units, 8, mode)
        unfused = P.sparse_piper_attention(
            *[x.cuda() for x in token_major(layer.heads())], units, 8, layer.scale, mode
        )
        assert relative_error(output, unfused) < BOUND
        assert torch.equal(output, layer.sparse(units, 8, mode))
        gate = torch.randn(1, 577, 4, head_dim, device="cuda")
        assert layer.coarse(units, 8, mode, gate).isfinite().all()

    def test_lengths(self):
        layer = Layer(576, lengths=[64, 17, 51, 1, 64, 64, 33, 64, 20], device="cuda")
        output = layer.sparse(HALF_AND_ALL, 6, MINMAX)
        unfused = P.sparse_piper_attention(
            *[x.cuda() for x in token_major(layer.heads())],
            HALF_AND_ALL, 6, layer.scale, MINMAX, layer.lengths,
        )  # fmt: skip
        kept = exists(576, layer.lengths.cpu())
        assert relative_error(output[:, kept], unfused[:, kept]) < BOUND

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_dense_chain(self, head_dim, is_causal):
        layer = Layer(577, heads=4, kv_heads=2, head_dim=head_dim, rotary=64, device="cuda")
        output = layer.dense(is_causal, torch.bfloat16)
        assert relative_error(output, layer.exact(is_causal)) < BOUND

    def test_a_replay_equals_eager_and_nothing_synchronizes(self):
        layer = Layer(577, heads=2, device="cuda")
        eager = layer.sparse(HALF_AND_ALL, 8, MINMAX), layer.dense()
        with no_synchronization():
            layer.sparse(HALF_AND_ALL, 8, MINMAX), layer.dense()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer.sparse(HALF_AND_ALL, 8, MINMAX), layer.dense()
        graph.replay()
        for ours, theirs in zip(captured, eager, strict=True):
            assert torch.equal(ours, theirs)

    def test_windows_of_a_long_sequence(self):
        """A product of more than one window, whose last one is ragged."""
        layer = Layer(20_000, heads=16, features=256, device="cuda")
        output = layer.dense(dtype=torch.bfloat16)
        again = layer.dense(dtype=torch.bfloat16)
        assert torch.equal(output, again)
        assert output.isfinite().all()
