"""Budgets, packed routes and the scores behind them."""

import pytest
import slow_attention
import torch

from piper_kernels.attention.sparse_piper_attention import (
    SparsePiperAttention,
    _routing,
    reference,
)
from piper_kernels.attention.sparse_piper_attention._blocks import to_blocks, valid_rows
from piper_kernels.attention.sparse_piper_attention._budget import (
    head_keep_blocks,
    ratio_units,
    route_layout,
)
from piper_kernels.attention.sparse_piper_attention._routing import (
    RoutingMode,
    RoutingRequest,
    RoutingSummaries,
    fill_full_keep_routes,
    select_routes,
    summarize,
)


def units(*ratios):
    return ratio_units(ratios)


def randn(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("ratios", "blocks", "expected"),
    [
        ((0.5, 1.0), 2, (1, 2)),
        ((0.2, 0.4, 0.6), 1036, (207, 414, 622)),
        ((0.34, 0.67, 1.0), 3, (1, 2, 3)),
        ((0.999, 0.999, 0.999), 3, (3, 3, 3)),
        ((0.000001, 0.000001), 7, (1, 1)),
        ((0.25, 0.25), 2, (1, 1)),
        ((0.3, 0.3, 0.3), 5, (2, 2, 1)),  # 4.5 rounds up, lower heads first
        ((1.0,), 65_536, (65_536,)),
    ],
)
def test_budgets(ratios, blocks, expected):
    assert head_keep_blocks(ratio_units(ratios), blocks) == expected


def test_budgets_keep_their_sum_and_bounds():
    generator = torch.Generator().manual_seed(0)
    for blocks in (1, 2, 3, 17, 100, 1036):
        for heads in (1, 3, 16):
            ratios = (torch.rand(heads, generator=generator) * 0.999 + 0.001).tolist()
            keep = head_keep_blocks(ratio_units(ratios), blocks)
            assert list(keep) == slow_attention.budget(ratios, blocks)
            assert all(1 <= kept <= blocks for kept in keep)


def test_ratios_are_stored_in_millionths():
    attention = SparsePiperAttention(torch.tensor([0.25, 1.0], dtype=torch.float64))
    assert attention.head_keep_ratios == (0.25, 1.0)
    assert SparsePiperAttention([0.1234565, 1]).head_keep_ratios == (0.123456, 1.0)
    assert not attention.state_dict()
    assert repr(attention) == "SparsePiperAttention(heads=2, routing='minmax')"
    assert SparsePiperAttention([1.0], routing="mean").routing == "mean"


@pytest.mark.parametrize(
    ("ratios", "error"),
    [
        ("0.5", TypeError),
        (b"0.5", TypeError),
        (0.5, TypeError),
        ([True], TypeError),
        (["0.5"], TypeError),
        (torch.tensor([1]), TypeError),
        (torch.tensor([True]), TypeError),
        ([], ValueError),
        (torch.ones(0), ValueError),
        (torch.ones(1, 1), ValueError),
        ([0.0], ValueError),
        ([-0.5], ValueError),
        ([1.5], ValueError),
        ([float("nan")], ValueError),
        ([float("inf")], ValueError),
        ([4e-7], ValueError),
    ],
)
def test_ratios_that_are_refused(ratios, error):
    with pytest.raises(error, match="sparse Piper"):
        SparsePiperAttention(ratios)


def test_an_unknown_routing():
    with pytest.raises(ValueError, match="'minmax', 'mean'"):
        SparsePiperAttention([1.0], routing="max")


@pytest.mark.parametrize("mode", list(RoutingMode))
@pytest.mark.parametrize("lengths", [None, [64, 1, 40, 63]])
def test_routes_equal_the_loops(mode, lengths):
    rows, ratios = (227, (0.4, 0.7, 1.0, 0.3)) if lengths is None else (256, (0.5,) * 4)
    lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    query, key = randn(2, rows, 4, 64), randn(2, rows, 2, 64, seed=4)
    valid = valid_rows(rows, lengths, query.device)
    summaries = summarize(to_blocks(query, valid), to_blocks(key, valid), valid, mode)
    layout = route_layout(units(*ratios), 3)
    routes = select_routes(summaries, mode, layout, 4)
    assert routes.dtype == torch.uint16
    assert routes.shape == (2, 4, layout.routes_per_query)
    expected = slow_attention.routes(query, key, ratios, 3, mode.name.lower(), lengths)
    for (b, h, i), tiles in expected.items():
        assert routes[b, i, layout.offsets[h] : layout.offsets[h + 1]].tolist() == tiles


def test_equal_scores_keep_the_lower_block():
    summaries = RoutingSummaries(torch.ones(1, 1, 1, 64), torch.ones(1, 1, 9, 64), torch.empty(0))
    routes = select_routes(summaries, RoutingMode.MEAN, route_layout(units(0.5), 9), 1)
    assert routes.tolist() == [[[0, 1, 2, 3, 4]]]  # 4.5 blocks round up


def test_scores_of_many_query_blocks_in_chunks(monkeypatch):
    summaries = RoutingSummaries(
        randn(1, 2, 400, 64), randn(1, 1, 20, 64, seed=5), randn(1, 1, 20, 64, seed=6)
    )
    layout = route_layout(units(0.2, 0.3), 20)
    seen, real = [], _routing.block_scores

    def scores(summaries, mode, query_blocks, key_blocks):
        seen.append((query_blocks.start, query_blocks.stop))
        return real(summaries, mode, query_blocks, key_blocks)

    monkeypatch.setattr(_routing, "block_scores", scores)
    routes = select_routes(summaries, RoutingMode.MINMAX, layout, 400)
    assert seen == [(0, 384), (384, 400)]
    monkeypatch.setattr(_routing, "SCORE_CHUNK", 400)
    assert torch.equal(
        select_routes(summaries, RoutingMode.MINMAX, layout, 400).int(), routes.int()
    )


@pytest.mark.parametrize("blocks", [3, 513, 65_536])
def test_full_keep_routes(blocks):
    layout = route_layout(units(1.0, 1.0), blocks)
    assert layout.keeps_all
    routes = torch.empty(1, 2, layout.routes_per_query, dtype=torch.uint16)
    assert fill_full_keep_routes(routes, layout) is routes
    assert routes[0, 1].tolist() == [*range(blocks)] * 2


@pytest.mark.parametrize("routing", ["minmax", "mean"])
def test_full_keep_scores_nothing_and_equals_the_scored_path(routing, monkeypatch):
    operands = [randn(1, 227, heads, 64, seed=heads) for heads in (4, 2, 2)]
    attention = SparsePiperAttention([0.999] * 4, routing=routing)
    found = attention(*operands, sparse_key_blocks=3)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "needs_routing", lambda *_: True)
        scored = attention(*operands, sparse_key_blocks=3)
    assert torch.equal(found, scored)
    for name in ("summarize", "select_routes"):
        monkeypatch.delattr(reference, name)
    assert torch.equal(attention(*operands, sparse_key_blocks=3), found)
    dense = SparsePiperAttention([0.4] * 4, routing=routing)
    assert torch.equal(dense(*operands, sparse_key_blocks=3, sparse_query_blocks=0), found)
    with pytest.raises(NameError):
        dense(*operands, sparse_key_blocks=3)


def test_routed_blocks():
    request = RoutingRequest(units(1.0), 2, RoutingMode.MEAN, 0)
    assert request.routed_blocks(5) == 0
    assert RoutingRequest(units(1.0), 2, RoutingMode.MEAN).routed_blocks(5) == 5
