"""Numeric checks of prepared operands, summaries and routes of sparse attention."""

import torch
from preparation_comparison import (
    BRAIN,
    DEVICE,
    FULL,
    HALF,
    MEAN,
    MINMAX,
    assert_codes,
    assert_floats,
    on_device,
    operands,
    permuted,
)

from piper_kernels.attention._preparation import routes, sparse
from piper_kernels.attention.sparse_piper_attention import _blocks, _preparation, _routing
from piper_kernels.attention.sparse_piper_attention._budget import route_layout


def check_sparse() -> None:
    for rows, head_dim, dtype, mode, masked in (
        (128, 64, BRAIN, MINMAX, True),
        (193, 128, HALF, MEAN, False),
        (193, 64, FULL, MINMAX, False),
        (192, 128, BRAIN, MEAN, True),
        (70, 64, BRAIN, None, False),
    ):
        tensors = [x.transpose(1, 2).contiguous() for x in operands(rows, rows, head_dim, dtype)]
        lengths = None
        if masked:
            lengths = torch.tensor([64, 1, 37][: rows // 64], dtype=torch.int32)
        valid = _blocks.valid_rows(rows, lengths, torch.device("cpu"))
        if masked:
            for x in tensors:
                x[:, ~valid.flatten()] = torch.nan
        blocks = [_blocks.to_blocks(x, valid) for x in tensors]
        expected = _preparation.prepare(*blocks, valid, rows, 0.125)
        actual, summaries = sparse.prepare_sparse(
            *on_device(*tensors),
            scale=0.125,
            mode=mode,
            block_lengths=None if lengths is None else on_device(lengths)[0],
        )
        assert_codes(actual.query, expected.query, "query")
        assert_codes(actual.key, expected.key, "key", 2e-3)
        assert_codes(actual.value, permuted(expected.value), "value", 2e-3)
        for name in ("query_scale", "key_scale", "value_multiplier", "value_mean"):
            assert_floats(getattr(actual, name), getattr(expected, name), name, 1e-5, 1e-6)
        if mode is None:
            assert summaries is None
            continue
        wanted = _routing.summarize(blocks[0], blocks[1], valid, mode)
        exact = {"rtol": 0, "atol": 0} if mode is MINMAX else {"rtol": 1e-5, "atol": 1e-6}
        for name in ("query", "key", "key_aux"):
            ours, theirs = getattr(summaries, name), getattr(wanted, name)
            assert ours.shape == theirs.shape, name
            assert_floats(ours, theirs, f"{name} summary", **exact)


def check_routes() -> None:
    cases = (
        (2, 1, 5, 7, (0.3, 0.9)),
        (4, 2, 9, 33, (0.1, 0.2, 0.5, 1.0)),
        (34, 17, 1, 20, (0.45,) * 34),
        (1, 1, 2, 1, (1.0,)),
    )
    for mode in (MINMAX, MEAN):
        for heads, kv_heads, queries, blocks, ratios in cases:
            layout = route_layout([round(ratio * 1e6) for ratio in ratios], blocks)
            table = routes.route_table(layout, torch.device(DEVICE))
            assert table.tolist() == [*layout.keep, *layout.offsets]
            check_selection(mode, (heads, kv_heads, queries, blocks), layout, table)


def check_selection(mode, sizes, layout, table) -> None:
    """Compare selections among small integers, where most scores are equal and all exact."""
    heads, kv_heads, queries, blocks = sizes
    generator = torch.Generator().manual_seed(5)
    shape = (2, kv_heads, blocks + 2, 64)
    key = torch.randint(-1, 2, shape, generator=generator).float()
    aux = key - torch.randint(0, 2, shape, generator=generator)
    query = torch.randint(-1, 2, (2, heads, queries + 1, 64), generator=generator).float()
    summaries = (query, key, aux if mode is MINMAX else aux[:, :, :0])
    expected = _routing.select_routes(_routing.RoutingSummaries(*summaries), mode, layout, queries)
    there = _routing.RoutingSummaries(*on_device(*summaries))
    actual = routes.select_routes(there, mode, layout, queries, table)
    assert actual.dtype == torch.uint16
    assert torch.equal(actual.cpu().int(), expected.int())
