"""What the tiles of the product on Hopper become, with the Gluon functions emulated in PyTorch."""

import pytest
import torch
from gluon_emulation import Block, Emulation, Pointer, Ring, Tile
from projection_operands import assert_codes, assert_floats, operands

from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode
from piper_kernels.fusions.convrot_int8_sage_qk import projections

pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

from piper_kernels.fusions.convrot_int8_sage_qk import _launch
from piper_kernels.fusions.projected_qk._launch import (
    SUMMARIES,
    KeyEncoder,
    QueryEncoder,
)
from piper_kernels.fusions.projected_value._launch import ValueEncoder

FUSIONS = "piper_kernels.fusions"
EMULATION = Emulation(
    f"{FUSIONS}.projected_qk._hopper_heads",
    f"{FUSIONS}.convrot_int8_sage_qk._hopper_epilogue",
    f"{FUSIONS}.convrot_int8_sage_qk._hopper_blocks",
)
BLOCKS = EMULATION.module(f"{FUSIONS}.convrot_int8_sage_qk._hopper_blocks")
MINMAX, MEAN = RoutingMode.MINMAX, RoutingMode.MEAN
HALF, BRAIN = torch.float16, torch.bfloat16


def number(value):
    return Block(torch.tensor(value))


def garbage(tensor):
    """Fill what nobody writes."""
    return tensor.fill_(torch.nan if tensor.is_floating_point() else 77)


def angle_tiles(table, tile):
    """Return the slots of a ring with the angles of 64 rows; none past the end."""
    padded = torch.zeros(64, 128)
    rows = table[64 * tile :][:64]
    padded[: rows.shape[0], : rows.shape[1]] = rows
    return Ring((*map(Tile, padded.chunk(2, 1)), None))


def encode(case, kind, targets, summary, mean=None, factor=1.0):
    """Encode every block of every tile from exact sums; what is past the end is random."""
    p, t, rows = case.projection, case.transform, case.inputs.qdata.shape[1]
    sums = case.inputs.qdata.double() @ p.qdata.double().T
    batch, tiles, width = sums.shape[0], -(-rows // 128) * 2, p.head_dim
    column_tiles = -(-sums.shape[2] // 128)
    padded = torch.randint(-9999, 9999, (batch, tiles * 64, column_tiles * 128)).double()
    padded[:, :rows, : sums.shape[2]] = sums
    if case.lengths is not None:  # products of rows that nobody may see
        gone = (torch.arange(64) >= case.lengths[:, None]).flatten()
        padded[:, :rows][:, gone] = 2.0**30
    unused, rotary = torch.empty(0), t.cos.shape[1]
    tensors = [case.inputs.scale, p.scale, p.bias, t.weight, mean, case.lengths, *targets]
    pointers = [Pointer.of(unused if x is None else x) for x in tensors]
    for index in range(batch * tiles * column_tiles):
        column, tile, at = (
            index % column_tiles,
            index // column_tiles % tiles,
            index // column_tiles,
        )
        block = padded[at // tiles, 64 * tile :][:64, 128 * column :][:, :128].int()
        BLOCKS.encode_block(
            Block(block), number(column * (128 // width)), number(at // tiles), number(tile), 0,
            angle_tiles(t.cos, tile), angle_tiles(t.sin, tile), Ring(), Ring(), *pointers,
            number(rows), number(p.heads), 1, t.eps, factor, None, kind, width, rotary, summary,
            0 if kind == BLOCKS.VALUES else -(-rotary // 64), None, p.bias is not None,
            t.weight is not None, case.lengths is not None,
        )  # fmt: skip


def sequence(case):
    return _launch._sequence(case.inputs, case.projection, case.lengths)


CASES = {
    "ragged": ({"rows": 130, "rotary": 128}, MINMAX),
    "lengths": (
        {"rows": 192, "heads": 1, "bias": BRAIN, "affine": BRAIN, "lengths": [64, 17, 51]},
        MEAN,
    ),
    "lengths, extrema": ({"rows": 128, "heads": 1, "rotary": 32, "lengths": [1, 64]}, MINMAX),
    "narrow": (
        {"rows": 64, "head_dim": 64, "heads": 3, "rotary": 64, "affine": None, "bias": None},
        MINMAX,
    ),
    "batches": ({"rows": 128, "head_dim": 64, "rotary": 32, "bias": HALF, "batch": 2}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_queries_equal_the_reference(name):
    sizes, mode = CASES[name]
    case = operands(**sizes)
    shared = (case.inputs, case.projection, case.transform, 0.1, mode, case.lengths)
    expected = projections.project_query(*shared)
    q = QueryEncoder(sequence(case), case.transform, 0.1, mode, projections.Granularity.PER_WARP)
    targets = (garbage(q.codes).view(torch.int16), garbage(q.scale), None, None, q.summary, None)
    garbage(q.summary)
    encode(case, BLOCKS.QUERIES, targets, SUMMARIES[mode].value, factor=q.factor)
    assert_codes(q.codes, expected[0], "query")
    assert_floats(q.scale, expected[1], "query scale")
    assert_floats(q.summary, expected[2], "query summary", atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_keys_and_their_sums_equal_the_reference(name):
    sizes, mode = CASES[name]
    case = operands(**sizes)
    shared = (case.inputs, case.projection, case.transform, mode, case.lengths)
    expected = projections.project_key(*shared)
    k = KeyEncoder(sequence(case), case.transform, mode, projections.Granularity.PER_WARP)
    for tensor in (k.keys, k.partials, k.summary, k.auxiliary):
        garbage(tensor)
    targets = (None, None, k.keys, k.partials, k.summary, k.auxiliary)
    encode(case, BLOCKS.KEYS, targets, SUMMARIES[mode].value)
    assert_floats(k.summary, expected[2], "key summary", atol=1e-5)
    assert_floats(k.auxiliary, expected[3], "auxiliary key summary", atol=1e-5)
    heads = projections.reference.project(case.inputs, case.projection)
    rotated = projections.projected_qk.normalize_and_rotate(heads, case.transform)
    kept = torch.ones(heads.shape[1], dtype=torch.bool)
    if case.lengths is not None:
        kept = (torch.arange(64) < case.lengths[:, None]).flatten()
    rows, rounded = k.keys[:, :, kept], rotated.transpose(1, 2)[:, :, kept].bfloat16()
    torch.testing.assert_close(rows, rounded, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(k.partials.sum(2), rows.float().sum(2), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("means", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_equal_the_reference(name, means):
    case = operands(**CASES[name][0])
    expected = projections.project_value(
        case.inputs, case.projection, case.input_mean, per_tile=True, with_block_means=means,
        block_lengths=case.lengths,
    )  # fmt: skip
    v = ValueEncoder(sequence(case), expected[2], True, means)
    targets = (garbage(v.codes), garbage(v.multiplier), None, None, v.block_means, None)
    encode(case, BLOCKS.VALUES, targets, int(means), mean=expected[2].contiguous())
    assert_codes(v.codes, expected[0], "value")
    assert_floats(v.multiplier, expected[1], "value multiplier", atol=1e-4)
    if means:
        assert_floats(v.block_means, expected[3], "means of blocks", atol=1e-5)


def test_rows_that_are_zero_or_huge():
    case = operands(130, heads=1, rotary=128, bias=None)
    case.inputs.scale[:, 3] = 0
    case.inputs.scale[:, 70:75] = 1e6
    expected = projections.project_query(case.inputs, case.projection, case.transform, 1.0, None)
    q = QueryEncoder(sequence(case), case.transform, 1.0, None, projections.Granularity.PER_WARP)
    targets = (q.codes.view(torch.int16), q.scale, None, None, None, None)
    encode(case, BLOCKS.QUERIES, targets, 0, factor=q.factor)
    assert_codes(q.codes, expected[0], "query")
    assert_floats(q.scale, expected[1], "query scale")
