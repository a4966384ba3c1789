"""Coarse attention against loops, its gradients, operators and graphs."""

import pytest
import torch

from piper_kernels.attention.coarse import (
    apply_coarse_attention_residual,
    coarse_attention,
    coarse_attention_residual,
    mean_pool_block_values,
    reference,
    sparse_piper_coarse_residual,
)
from piper_kernels.attention.sparse_piper_attention._blocks import to_blocks, valid_rows
from piper_kernels.attention.sparse_piper_attention._preparation import prepare
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode, summarize

ops = torch.ops.piper_kernels
LENGTHS = torch.tensor([64, 17, 51], dtype=torch.int32)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def randn(*shape, seed=11, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(rows=193, heads=2, dtype=torch.float32):
    return [randn(1, rows, heads, 64, seed=seed, dtype=dtype) for seed in range(4)]


def slow_residual(query, key, value, gate, blocks, scale, routing, lengths=None):
    rows = query.shape[1]
    counts = [min(64, rows - s) for s in range(0, rows, 64)] if lengths is None else lengths
    spans = [slice(64 * i, 64 * i + int(n)) for i, n in enumerate(counts)]
    output = torch.zeros(query.shape, dtype=torch.float64)
    for b in range(query.shape[0]):
        for h in range(query.shape[2]):
            q, k, v, g = (x[b, :, h].double() for x in (query, key, value, gate))
            for i, span in enumerate(spans):
                scores = []
                for other in spans[:blocks]:
                    if routing == "mean":
                        scores.append(q[span].mean(0) @ k[other].mean(0))
                    else:
                        summary = q[span].amax(0) + q[span].amin(0)
                        products = summary @ k[other].amax(0), summary @ k[other].amin(0)
                        scores.append(torch.maximum(*products))
                weights = (torch.stack(scores) * scale).softmax(0)
                pooled = torch.stack([v[other].mean(0) for other in spans[:blocks]])
                stop = min(64 * i + 64, rows)
                output[b, 64 * i : stop, h] = g[64 * i : stop] * (weights @ pooled)
    return output


@pytest.mark.parametrize("routing", ["mean", "minmax"])
@pytest.mark.parametrize(
    ("rows", "blocks", "lengths"),
    [(64, 1, None), (65, 2, None), (127, 1, None), (193, 4, None), (192, 3, LENGTHS),
     (192, 2, LENGTHS)],
)  # fmt: skip
def test_equals_the_loops(rows, blocks, lengths, routing):
    given = tensors(rows)
    found = sparse_piper_coarse_residual(
        *given, routing=routing, coarse_key_blocks=blocks, coarse_scale=0.125, block_lengths=lengths
    )
    expected = slow_residual(*given, blocks, 0.125, routing, lengths)
    torch.testing.assert_close(found.double(), expected, **CLOSE)
    assert found.is_contiguous()


def test_all_blocks_are_the_default():
    given = tensors(dtype=torch.bfloat16)
    options = {"routing": "mean", "coarse_scale": 0.125}
    found = sparse_piper_coarse_residual(*given, **options)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, sparse_piper_coarse_residual(*given, **options, coarse_key_blocks=4))


def test_chunks_of_query_blocks(monkeypatch):
    given = tensors(321)
    options = {"routing": "minmax", "coarse_scale": 0.125}
    expected = sparse_piper_coarse_residual(*given, **options)
    monkeypatch.setattr(reference, "SCORE_CHUNK", 2)
    torch.testing.assert_close(sparse_piper_coarse_residual(*given, **options), expected)


def test_pooling():
    value = randn(2, 70, 3, 64)
    found = mean_pool_block_values(value)
    assert found.shape == (2, 3, 2, 64)
    torch.testing.assert_close(found[:, :, 1], value[:, 64:].mean(1))
    value = randn(1, 192, 3, 64)
    value[:, 64 + 17 : 128] = 10_000
    value[:, 128 + 51 :] = torch.nan
    value.requires_grad_()
    found = mean_pool_block_values(value, LENGTHS)
    torch.testing.assert_close(found[:, :, 1], value[:, 64 : 64 + 17].mean(1))
    found.sum().backward()
    expected = torch.zeros(192)
    for block, length in enumerate(LENGTHS.tolist()):
        expected[64 * block : 64 * block + length] = 1 / length
    torch.testing.assert_close(value.grad, expected[None, :, None, None].expand(1, 192, 3, 64))


def test_given_scores():
    scores, pooled, gate = randn(1, 2, 3, 5), randn(1, 2, 5, 64), randn(1, 130, 2, 64).half()
    coarse = coarse_attention(scores, pooled)
    torch.testing.assert_close(coarse, scores.softmax(-1) @ pooled)
    found = coarse_attention_residual(scores, pooled, gate)
    assert torch.equal(found, apply_coarse_attention_residual(coarse, gate))
    assert found.dtype == torch.float16
    for row in (0, 63, 64, 129):
        expected = (gate[:, row].float() * coarse[:, :, row // 64]).half()
        assert torch.equal(found[:, row], expected)


def test_a_zero_gate_changes_nothing():
    query, key, value, fine = tensors()
    residual = sparse_piper_coarse_residual(
        query, key, value, torch.zeros_like(query), routing="minmax", coarse_scale=1.0
    )
    assert torch.equal(fine + residual, fine)


@pytest.mark.parametrize("routing", ["mean", "minmax"])
@pytest.mark.parametrize("lengths", [None, torch.tensor([3, 64], dtype=torch.int32)])
def test_gradients(routing, lengths):
    rows = 66 if lengths is None else 128
    given = [x[:, :rows, :1].double().requires_grad_() for x in tensors(rows)]
    weights = randn(1, rows, 1, 64).double()

    def losses(step):
        """Central difference along one direction, in float64."""
        moved = [x.detach() + step * d for x, d in zip(given, directions, strict=True)]
        blocks = slow_residual(*moved, 2, 0.125, routing, lengths)
        return (blocks * weights).sum()

    directions = [randn(*x.shape, seed=s).double() for s, x in enumerate(given, 20)]
    floats = [x.detach().float().requires_grad_() for x in given]
    output = sparse_piper_coarse_residual(
        *floats, routing=routing, coarse_scale=0.125, block_lengths=lengths
    )
    (output * weights.float()).sum().backward()
    found = sum((x.grad.double() * d).sum() for x, d in zip(floats, directions, strict=True))
    expected = (losses(1e-6) - losses(-1e-6)) / 2e-6
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert all(x.grad.any() and x.grad.isfinite().all() for x in floats)


def test_the_operator_and_the_composition_agree():
    given = tensors()
    options = {"routing": "minmax", "coarse_scale": 0.125}
    expected = sparse_piper_coarse_residual(*given, **options)
    given[1].requires_grad_()
    assert torch.equal(sparse_piper_coarse_residual(*given, **options), expected)


@pytest.mark.parametrize("trained", [False, True])
def test_one_graph_for_changed_lengths(trained):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def call(query, key, value, gate, lengths):
        return sparse_piper_coarse_residual(
            query, key, value, gate, routing="minmax", coarse_scale=0.125, block_lengths=lengths
        )

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
    for index, rows in enumerate((192, 256)):
        given = tensors(rows)
        if trained:
            given[3].requires_grad_()
        lengths = torch.full((rows // 64,), 64 - index, dtype=torch.int32)
        torch.testing.assert_close(compiled(*given, lengths), call(*given, lengths))
    assert len(graphs) == 1
    names = [str(node.target) for node in graphs[0].graph.nodes]
    assert any("sparse_piper_coarse_residual" in name for name in names) is not trained


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_opcheck(lengths):
    rows = 193 if lengths is None else 192
    given = tensors(rows)
    arguments = (*given, 2, 0.125, 0, lengths)
    torch.library.opcheck(ops.sparse_piper_coarse_residual.default, arguments)
    torch.library.opcheck(
        ops.sparse_piper_attention_with_coarse_residual_from_quantized.default,
        *fused(given, rows, lengths),
    )


def fused(given, rows, lengths=None, units=(500_000, 1_000_000), blocks=3, mode=0, **changes):
    query, key, value, gate = given
    valid = valid_rows(rows, lengths, query.device)
    q, k, v = (to_blocks(x, valid) for x in (query, key, value))
    codes, s = prepare(q, k, v, valid, rows, 0.125), summarize(q, k, valid, RoutingMode(mode))
    arguments = {
        "block_mean": mean_pool_block_values(value, lengths),
        "coarse_gate": gate,
        "head_keep_ratio_units": list(units),
        "sparse_key_blocks": 2,
        "logical_sequence_length": rows,
        "routing_mode": mode,
        "coarse_scale": 0.125,
        "block_lengths": lengths,
        "coarse_key_blocks": blocks,
        "sparse_query_blocks": None,
    } | changes
    operands = (codes.query, codes.query_scale, s.query, codes.key, codes.key_scale, s.key,
                s.key_aux, codes.value, codes.value_multiplier, codes.value_mean)  # fmt: skip
    return (*operands, *arguments.values()), {"output_dtype": torch.float32}


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("units", [(500_000, 1_000_000), (1_000_000, 1_000_000)])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_the_fused_sum(lengths, units, mode):
    rows = 193 if lengths is None else 192
    given = tensors(rows)
    arguments, options = fused(given, rows, lengths, units, mode=mode)
    fuse = ops.sparse_piper_attention_with_coarse_residual_from_quantized
    found = fuse(*arguments, **options)
    fine = ops.sparse_piper_attention(*given[:3], list(units), 2, 0.125, mode, lengths)
    coarse = ops.sparse_piper_coarse_residual(*given, 3, 0.125, mode, lengths)
    torch.testing.assert_close(found, fine + coarse)
    once = fuse(*arguments, output_dtype=torch.bfloat16)
    assert torch.equal(once, found.bfloat16())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"coarse_key_blocks": 1}, "coarse_key_blocks"),
        ({"coarse_key_blocks": 5}, "coarse_key_blocks"),
        ({"coarse_scale": 0.0}, "coarse attention scale must be finite and positive"),
        ({"block_mean": torch.zeros(1, 2, 3, 64)}, "block_mean"),
        ({"block_mean": torch.zeros(1, 2, 4, 64).double()}, "block_mean"),
        ({"coarse_gate": torch.zeros(1, 192, 2, 64)}, "coarse_gate"),
        ({"coarse_gate": torch.zeros(1, 193, 2, 64).int()}, "coarse_gate"),
        ({"coarse_gate": torch.zeros(1, 193, 2, 64, device="meta")}, "coarse_gate"),
    ],
)
def test_fused_operands_that_are_refused(changes, message):
    arguments, options = fused(tensors(), 193, **changes)
    with pytest.raises(ValueError, match=message):
        ops.sparse_piper_attention_with_coarse_residual_from_quantized(*arguments, **options)


def refused(error, message, *given, **options):
    options = {"routing": "mean", "coarse_scale": 0.125, **options}
    with pytest.raises(error, match=message):
        sparse_piper_coarse_residual(*given, **options)


def test_operands_that_are_refused():
    query, key, value, gate = tensors()
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        message = "coarse attention scale must be finite and positive"
        refused(ValueError, message, query, key, value, gate, coarse_scale=scale)
    refused(ValueError, "matching shapes", query, key[:, :, :1], value, gate)
    refused(ValueError, "matching shapes", query, key, value, gate[:, :64])
    refused(ValueError, "share float16", query, key, value, gate.half())
    refused(ValueError, "share a device", query, key, value, gate.to("meta"))
    refused(ValueError, "batch,sequence", query[0], key, value, gate)
    refused(ValueError, "routing must be one of", query, key, value, gate, routing="max")
    refused(TypeError, "coarse_key_blocks", query, key, value, gate, coarse_key_blocks=True)
    for blocks in (0, 5):
        refused(ValueError, "coarse_key_blocks", query, key, value, gate, coarse_key_blocks=blocks)
    refused(ValueError, "block_lengths", query, key, value, gate, block_lengths=LENGTHS)


def test_blocks_that_are_refused():
    scores, pooled, gate = randn(1, 2, 3, 5), randn(1, 2, 5, 64), randn(1, 130, 2, 64)
    coarse = coarse_attention(scores, pooled)
    for call in (
        lambda: coarse_attention(scores[0], pooled),
        lambda: coarse_attention(scores.half(), pooled),
        lambda: coarse_attention(scores, pooled.bfloat16()),
        lambda: coarse_attention(scores, pooled[:, :, 1:]),
        lambda: coarse_attention(scores, pooled.to("meta")),
        lambda: apply_coarse_attention_residual(coarse.half(), gate),
        lambda: apply_coarse_attention_residual(coarse[:, :, 1:], gate),
        lambda: apply_coarse_attention_residual(coarse, gate.int()),
        lambda: mean_pool_block_values(randn(70, 3, 64)),
        lambda: mean_pool_block_values(randn(1, 70, 3, 64), LENGTHS),
    ):
        with pytest.raises(ValueError, match="coarse attention"):
            call()
