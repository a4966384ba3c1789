"""Checks of operands, the operators, their fakes, and compiled graphs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from piper_kernels.attention.sparse_piper_attention import SparsePiperAttention, _backend
from piper_kernels.attention.sparse_piper_attention._blocks import to_blocks, valid_rows
from piper_kernels.attention.sparse_piper_attention._portable import PortableBackend
from piper_kernels.attention.sparse_piper_attention._preparation import prepare
from piper_kernels.attention.sparse_piper_attention._routing import (
    RoutingMode,
    RoutingRequest,
    RoutingSummaries,
    summarize,
)

UNITS = [400_000, 700_000]
ops = torch.ops.piper_kernels


def operands(rows=193, heads=2, kv_heads=1, features=64, dtype=torch.bfloat16, seed=7):
    generator = torch.Generator().manual_seed(seed)
    counts = (heads, kv_heads, kv_heads)
    return [torch.randn(1, rows, n, features, generator=generator).to(dtype) for n in counts]


def prepared(query, key, value, mode=RoutingMode.MINMAX, lengths=None):
    """Return the operands of the quantized operator as a producer makes them."""
    rows = query.shape[1]
    valid = valid_rows(rows, lengths, query.device)
    q, k, v = (to_blocks(x, valid) for x in (query, key, value))
    return prepare(q, k, v, valid, rows, query.shape[3] ** -0.5), summarize(q, k, valid, mode)


def arguments(codes, summaries):
    return (
        codes.query, codes.query_scale, summaries.query, codes.key, codes.key_scale, summaries.key,
        summaries.key_aux, codes.value, codes.value_multiplier, codes.value_mean,
    )  # fmt: skip


def changed(index, change):
    found = operands()
    found[index] = change(found[index])
    return found


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (changed(0, lambda x: x[0]), r"\[batch,sequence,heads,features\]"),
        (changed(0, lambda x: x[0, 0, 0, 0]), r"\[batch,sequence,heads,features\]"),
        (changed(1, lambda x: x.half()), "share float16, bfloat16, or float32"),
        ([x.double() for x in operands()], "share float16, bfloat16, or float32"),
        (changed(2, lambda x: x.to("meta")), "share a device"),
        (changed(1, lambda x: x.transpose(1, 3).contiguous().transpose(1, 3)), "contiguous feat"),
        (changed(1, lambda x: x[:, :-1]), "matching shapes"),
        (changed(0, lambda x: x.expand(2, -1, -1, -1)), "matching shapes"),
        (operands(features=32), "head_dim=64 or 128"),
        (operands(features=0), "head_dim=64 or 128"),
        (operands(rows=63), "at least 64 sequence rows"),
        (operands(heads=3), "one value per head"),
        (operands(heads=2, kv_heads=4), "head"),
        (operands(heads=3, kv_heads=2), "head"),
        (operands(heads=2, kv_heads=0), "head"),
        (operands(heads=0, kv_heads=1), "head"),
        (changed(2, lambda x: x.expand(-1, -1, 2, -1)), "head"),
    ],
)
def test_operands_that_are_refused(tensors, message):
    attention = SparsePiperAttention([0.4, 0.7])
    with pytest.raises(ValueError, match=r"^sparse Piper") as caught:
        attention(*tensors, sparse_key_blocks=1)
    caught.match(message)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in tensors]
        with pytest.raises(ValueError, match=message):
            ops.sparse_piper_attention(*fakes, UNITS, 1, 0.1, 0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sparse_key_blocks": True}, TypeError, "sparse_key_blocks"),
        ({"sparse_key_blocks": 1.0}, TypeError, "sparse_key_blocks"),
        ({"sparse_key_blocks": 0}, ValueError, "sparse_key_blocks"),
        ({"sparse_key_blocks": 4}, ValueError, "sparse_key_blocks"),
        ({"sparse_query_blocks": True}, TypeError, "sparse_query_blocks"),
        ({"sparse_query_blocks": -1}, ValueError, "sparse_query_blocks"),
        ({"sparse_query_blocks": 5}, ValueError, "sparse_query_blocks"),
        ({"scale": 0.0}, ValueError, "finite and positive"),
        ({"scale": float("nan")}, ValueError, "finite and positive"),
        ({"scale": float("inf")}, ValueError, "finite and positive"),
        ({"block_lengths": torch.ones(4, dtype=torch.int32)}, ValueError, "block_lengths"),
        ({"block_lengths": [64, 64, 64]}, TypeError, "block_lengths must be a tensor, got list"),
    ],
)
def test_options_that_are_refused(options, error, message):
    options = {"sparse_key_blocks": 2, **options}
    with pytest.raises(error, match="sparse Piper") as caught:
        SparsePiperAttention([0.4, 0.7])(*operands(), **options)
    caught.match(message)


@pytest.mark.parametrize(
    "lengths",
    [
        torch.ones(3, dtype=torch.int64),
        torch.ones(2, dtype=torch.int32),
        torch.ones(3, 1, dtype=torch.int32),
        torch.ones(6, dtype=torch.int32)[::2],
        torch.ones(3, dtype=torch.int32, device="meta"),
    ],
)
def test_block_lengths_that_are_refused(lengths):
    with pytest.raises(ValueError, match="block_lengths must be contiguous int32"):
        SparsePiperAttention([0.4, 0.7])(*operands(192), sparse_key_blocks=2, block_lengths=lengths)


def test_more_routes_than_uint16():
    tensors = [x.to("meta").expand(-1, 64 * 65_537, -1, -1) for x in operands(1)]
    attention = SparsePiperAttention([0.4, 0.7])
    with pytest.raises(ValueError, match="65536"):
        attention(*tensors, sparse_key_blocks=65_537)
    assert attention(*tensors, sparse_key_blocks=65_536).shape == tensors[0].shape


def test_gradients_are_refused():
    tensors = [x.requires_grad_() for x in operands()]
    attention = SparsePiperAttention([0.4, 0.7])
    with pytest.raises(RuntimeError, match="inference-only"):
        attention(*tensors, sparse_key_blocks=1)
    with torch.no_grad():
        attention(*tensors, sparse_key_blocks=1)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("lengths", [None, torch.tensor([64, 5, 64], dtype=torch.int32)])
def test_opcheck(mode, lengths):
    rows = 193 if lengths is None else 192
    tensors = operands(rows)
    torch.library.opcheck(
        ops.sparse_piper_attention.default, (*tensors, UNITS, 2, 0.125, mode, lengths, 1)
    )
    given = arguments(*prepared(*tensors, RoutingMode(mode), lengths))
    torch.library.opcheck(
        ops.sparse_piper_attention_from_quantized.default,
        (*given, UNITS, 2, rows, mode, lengths, None),
        {"output_dtype": torch.float16},
    )


@pytest.mark.parametrize("mode", list(RoutingMode))
@pytest.mark.parametrize("rows", [64, 65, 127, 129, 193])
def test_quantized_operands_give_the_same(rows, mode):
    tensors = operands(rows)
    codes, summaries = prepared(*tensors, mode)
    assert not codes.query[:, :, rows:].any()
    assert not codes.key[:, :, rows:].any()
    assert not codes.value[..., rows:].any()
    found = ops.sparse_piper_attention_from_quantized(
        *arguments(codes, summaries), UNITS, 1, rows, mode
    )
    expected = ops.sparse_piper_attention(*tensors, UNITS, 1, 0.125, mode)
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


def test_quantized_operands_keep_padded_rows():
    lengths = torch.tensor([64, 17, 51], dtype=torch.int32)
    tensors = operands(192)
    given = arguments(*prepared(*tensors, lengths=lengths))
    found = ops.sparse_piper_attention_from_quantized(*given, UNITS, 2, 192, 0, lengths)
    assert torch.equal(found, ops.sparse_piper_attention(*tensors, UNITS, 2, 0.125, 0, lengths))


@pytest.mark.parametrize("index", range(10))
@pytest.mark.parametrize(
    "change", [lambda x: x.double(), lambda x: x[..., :-1], lambda x: x.to("meta")]
)
def test_quantized_operands_that_are_refused(index, change):
    given = list(arguments(*prepared(*operands())))
    given[index] = change(given[index])
    with pytest.raises(ValueError, match="sparse Piper"):
        ops.sparse_piper_attention_from_quantized(*given, UNITS, 1, 193, 0)


def test_quantized_lengths_and_dtypes_that_are_refused():
    given = arguments(*prepared(*operands()))
    for units, rows, options in (
        (UNITS, 192, {}),
        (UNITS, 257, {}),
        ([1000], 193, {}),
        (UNITS, 193, {"output_dtype": torch.int8}),
    ):
        with pytest.raises(ValueError, match="sparse Piper"):
            ops.sparse_piper_attention_from_quantized(*given, units, 1, rows, 0, **options)


@pytest.mark.parametrize(("offset", "count"), [(0, 1), (1, 2), (2, None), (3, 1)])
def test_a_range_of_query_blocks_is_a_slice(offset, count):
    codes, summaries = prepared(*operands())
    request = RoutingRequest(tuple(UNITS), 2, RoutingMode.MINMAX, 3)
    generator = torch.Generator().manual_seed(1)
    coarse = {
        "coarse_output": torch.randn(1, 2, 4, 64, generator=generator),
        "coarse_gate": torch.randn(1, 193, 2, 64, generator=generator),
    }
    run = PortableBackend().attention_from_quantized
    shared = (codes, summaries, request, 193, None, torch.float32)
    for options in ({}, coarse):
        full = run(*shared, **options)
        part = run(*shared, **options, query_block_offset=offset, query_block_count=count)
        stop = None if count is None else 64 * (offset + count)
        assert torch.equal(part, full[:, 64 * offset : stop])
    plain = run(*shared)
    row = coarse["coarse_output"][:, :, 2] * coarse["coarse_gate"][:, 130]
    torch.testing.assert_close(run(*shared, **coarse)[:, 130], plain[:, 130] + row)


def test_one_graph_for_all_lengths_and_budgets():
    frames = []

    def backend(graph, _):
        frames.append(graph)
        return graph

    attention = SparsePiperAttention([0.4, 0.7])

    def call(query, key, value, blocks, lengths, queries):
        output = attention(
            query, key, value, sparse_key_blocks=blocks, block_lengths=lengths,
            sparse_query_blocks=queries,
        )  # fmt: skip
        return -output

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
    for rows, blocks, queries in ((256, 3, 2), (320, 5, 4), (384, 2, 6)):
        lengths = torch.full((rows // 64,), 64, dtype=torch.int32)
        lengths[1] = blocks
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands(rows)]
        found = compiled(*tensors, blocks, lengths, queries)
        assert torch.equal(found, call(*tensors, blocks, lengths, queries))
    assert len(frames) == 1


def test_summaries_of_the_mean_have_no_minimum():
    _, summaries = prepared(*operands(), RoutingMode.MEAN)
    assert isinstance(summaries, RoutingSummaries)
    assert summaries.key_aux.shape == (1, 1, 0, 64)


def test_backends_are_asked_in_order(monkeypatch):
    class Refusing:
        def support(self, device, head_dim):
            return False, f"not for {device} with {head_dim}"

    portable = PortableBackend()
    monkeypatch.setattr(_backend, "BACKENDS", (Refusing(), portable))
    assert _backend.select_backend(torch.device("cpu"), 64) is portable
    monkeypatch.setattr(_backend, "BACKENDS", (Refusing(),))
    with pytest.raises(RuntimeError, match="not for cpu with 64"):
        _backend.select_backend(torch.device("cpu"), 64)
