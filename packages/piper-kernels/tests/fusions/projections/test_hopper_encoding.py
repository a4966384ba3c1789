"""What the tiles of the product on Hopper become, with the Gluon functions emulated in PyTorch."""

import pytest
import torch
from gluon_emulation import Block, Emulation, Pointer
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
    f"{FUSIONS}.convrot_int8_sage_qk._hopper_kernel",
)
KERNEL = EMULATION.module(f"{FUSIONS}.convrot_int8_sage_qk._hopper_kernel")
MINMAX, MEAN = RoutingMode.MINMAX, RoutingMode.MEAN
HALF, BRAIN = torch.float16, torch.bfloat16


def number(value):
    return Block(torch.tensor(value))


def garbage(tensor):
    """Fill what nobody writes."""
    return tensor.fill_(torch.nan if tensor.is_floating_point() else 77)


def encode(case, kind, targets, summary, mean=None, factor=1.0):
    """Encode every block of every head from exact sums; rows past the end have random ones."""
    p, t, rows = case.projection, case.transform, case.inputs.qdata.shape[1]
    sums = case.inputs.qdata.double() @ p.qdata.double().T
    tiles = -(-rows // 64)
    padded = torch.randint(-9999, 9999, (sums.shape[0], tiles * 64, sums.shape[2])).double()
    padded[:, :rows] = sums
    if case.lengths is not None:  # products of rows that nobody may see
        gone = (torch.arange(64) >= case.lengths[:, None]).flatten()
        padded[:, gone] = 2.0**30
    width, unused = p.head_dim, torch.empty(0)
    tensors = [case.inputs.scale, p.scale, p.bias, t.weight, t.cos, t.sin, mean, case.lengths]
    pointers = [Pointer.of(unused if x is None else x) for x in (*tensors, *targets)]
    for batch in range(sums.shape[0]):
        for head in range(p.heads):
            for tile in range(tiles):
                block = padded[batch, 64 * tile :][:64, head * width :][:, :width].int()
                KERNEL._encode_head(
                    Block(block), number(head), number(batch), number(tile), *pointers,
                    number(rows), number(p.heads), number(tiles), 1, t.eps, factor, kind,
                    t.cos.shape[1], summary, None, p.bias is not None, t.weight is not None,
                    case.lengths is not None,
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
    encode(case, KERNEL.QUERIES, targets, SUMMARIES[mode].value, factor=q.factor)
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
    encode(case, KERNEL.KEYS, targets, SUMMARIES[mode].value)
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
    encode(case, KERNEL.VALUES, targets, int(means), mean=expected[2].contiguous())
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
    encode(case, KERNEL.QUERIES, targets, 0, factor=q.factor)
    assert_codes(q.codes, expected[0], "query")
    assert_floats(q.scale, expected[1], "query scale")
