"""Operators that project to quantized queries, keys and values, against float64."""

import math

import pytest
import torch
from projection_operands import operands
from projection_oracle import blocks, exists, normalize_and_rotate, project, signed_hadamard

from piper_kernels.fusions.convrot_int8_piper import _ops as dense
from piper_kernels.fusions.convrot_int8_sparse_piper import _ops as sparse
from piper_kernels.fusions.convrot_int8_sparse_piper import _ops_value as sparse_value

MINMAX, MEAN = 0, 1
SCALE = 0.09
LOGIT = SCALE * math.log2(math.e)


def weights(case):
    return case.inputs.qdata, case.inputs.scale, case.projection.qdata, case.projection.scale


def rows_of(case):
    t = case.transform
    return *weights(case), t.weight, t.cos, t.sin, t.eps


def options(case):
    return {"bias": case.projection.bias, "head_dim": case.projection.head_dim}


def values_of(case):
    qdata, scale, weight, weight_scale = weights(case)
    return qdata, scale, case.input_mean, weight, weight_scale


def check_codes(codes, scale, expected, kept):
    """Codes of ``[B, H, S', D]`` are within half a step and zero where no row exists."""
    padded = torch.zeros(codes.shape, dtype=torch.float64)
    padded[:, :, : expected.shape[2]] = torch.where(kept[:, None], expected, 0.0)
    present = torch.zeros(codes.shape[2], dtype=torch.bool)
    present[: kept.numel()] = kept
    assert not codes[:, :, ~present].any()
    error = (codes.double() * scale.double()[..., None] - padded).abs()
    assert (error <= 0.501 * scale.double()[..., None] + 1e-6).all()


def per_row(scale, rows):
    return scale.repeat_interleave(rows // scale.shape[2], 2)


CASES = {
    "ragged": {"rows": 193, "rotary": 96},
    "lengths": {"rows": 192, "rotary": 128, "lengths": [64, 17, 51], "bias": torch.bfloat16},
    "narrow": {"rows": 129, "head_dim": 64, "rotary": 64, "batch": 2, "affine": torch.bfloat16},
    "plain": {"rows": 70, "head_dim": 64, "rotary": 34, "affine": None, "bias": None},
}


@pytest.fixture(params=CASES)
def case(request):
    return operands(**CASES[request.param])


@pytest.mark.parametrize("mode", [MINMAX, MEAN])
def test_queries(case, mode):
    codes, scale, summary = sparse.project_query(
        *rows_of(case), SCALE, mode, case.lengths, **options(case)
    )
    heads = normalize_and_rotate(project(case.inputs, case.projection), case.transform)
    kept = exists(heads.shape[2], case.lengths)
    rotated = heads @ signed_hadamard(heads.shape[3])
    rows = per_row(scale, codes.shape[2])
    assert scale.shape[2] * 32 == codes.shape[2] == -(-heads.shape[2] // 64) * 64
    check_codes(codes, rows / LOGIT, rotated, kept)
    groups = (codes.unflatten(2, (-1, 32)).abs().amax((3, 4)) == 127) | (scale <= LOGIT * 2e-7)
    assert groups.all(), "the largest number of a group has the code 127"
    for index, rows in enumerate(blocks(heads, kept)):
        wanted = rows.mean(2) if mode == MEAN else rows.amax(2) + rows.amin(2)
        torch.testing.assert_close(summary[:, :, index].double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [MINMAX, MEAN])
def test_keys(case, mode):
    codes, scale, summary, auxiliary = sparse.project_key(
        *rows_of(case), mode, case.lengths, **options(case)
    )
    heads = normalize_and_rotate(project(case.inputs, case.projection), case.transform)
    kept = exists(heads.shape[2], case.lengths)
    stored = heads.float().bfloat16().double()
    mean = stored[:, :, kept].mean(2, keepdim=True)
    # What is rounded twice may be off by one step of bfloat16.
    step = heads.abs().amax() * 2**-8 * heads.shape[3] ** 0.5
    rotated = (stored - mean) @ signed_hadamard(heads.shape[3])
    rows = per_row(scale, codes.shape[2])
    assert scale.shape[2] * 64 == codes.shape[2]
    error = codes.double() * rows.double()[..., None]
    error[:, :, : kept.numel()] -= torch.where(kept[:, None], rotated, 0.0)
    assert (error.abs() <= 0.51 * rows.double()[..., None] + step * 0.02).all()
    assert auxiliary.shape[2] == (0 if mode == MEAN else summary.shape[2])
    for index, rows in enumerate(blocks(heads, kept)):
        wanted = rows.mean(2) if mode == MEAN else rows.amax(2)
        torch.testing.assert_close(summary[:, :, index].double(), wanted, rtol=1e-5, atol=1e-5)
        if mode == MINMAX:
            low = auxiliary[:, :, index].double()
            torch.testing.assert_close(low, rows.amin(2), rtol=1e-5, atol=1e-5)


def test_values(case):
    codes, multiplier, mean, means = sparse_value.project_value_with_block_means(
        *values_of(case), case.lengths, **options(case)
    )
    heads = project(case.inputs, case.projection)
    kept = exists(heads.shape[2], case.lengths)
    wanted = heads[:, :, kept].mean(2)
    torch.testing.assert_close(mean.double(), wanted, rtol=1e-4, atol=1e-4)
    scale = per_row(multiplier[..., 0] / 255, codes.shape[3])
    assert multiplier.shape[2:] == (codes.shape[3] // 64, 1)
    check_codes(codes.mT, scale, heads - mean.double()[:, :, None], kept)
    for index, rows in enumerate(blocks(heads, kept)):
        torch.testing.assert_close(means[:, :, index].double(), rows.mean(2), rtol=1e-4, atol=1e-4)
    without = sparse_value.project_value(*values_of(case), case.lengths, **options(case))
    for first, second in zip(without, (codes, multiplier, mean), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("quantization", ["per_warp", "per_thread"])
@pytest.mark.parametrize("rows", [1, 65])
def test_dense_rows(rows, quantization):
    case = operands(rows, head_dim=64, rotary=64)
    extra = options(case) | {"qk_quantization": quantization}
    heads = normalize_and_rotate(project(case.inputs, case.projection), case.transform)
    kept = exists(rows, None)
    rotation = signed_hadamard(64)
    codes, scale = dense.project_query(*rows_of(case), SCALE, **extra)
    padded = codes.shape[2]
    assert scale.shape[2] == (padded // 32 if quantization == "per_warp" else padded)
    check_codes(codes, per_row(scale, padded) / LOGIT, heads @ rotation, kept)
    codes, scale = dense.project_key(*rows_of(case), **extra)
    assert scale.shape[2] == (padded // 64 if quantization == "per_warp" else padded)
    stored = heads.float().bfloat16().double()
    stored = (stored - stored.mean(2, keepdim=True)) @ rotation
    error = codes[:, :, :rows].double() * per_row(scale, padded)[:, :, :rows, None] - stored
    assert error.abs().max() <= 0.51 * scale.max() + 0.01


@pytest.mark.parametrize("centered", [True, False])
def test_dense_values(centered):
    case = operands(65, head_dim=64)
    qdata, scale, mean, *weight = values_of(case)
    codes, multiplier, log_scale, value_mean = dense.project_value(
        qdata, scale, mean if centered else None, *weight, **options(case)
    )
    heads = project(case.inputs, case.projection)
    wanted = heads.mean(2) if centered else torch.zeros_like(heads[:, :, 0])
    torch.testing.assert_close(value_mean.double(), wanted, rtol=1e-4, atol=1e-4)
    check_codes(
        codes.mT, multiplier / 255, heads - value_mean.double()[:, :, None], exists(65, None)
    )
    torch.testing.assert_close(log_scale.exp2() * 255, multiplier)


@pytest.mark.parametrize("rows", [64, 128])
def test_a_window_of_rows_is_the_same_rows_of_the_sequence(rows):
    from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode
    from piper_kernels.fusions.convrot_int8_sage_qk import projections

    case = operands(193, head_dim=64, rotary=64, batch=2)
    shared = (SCALE, RoutingMode.MINMAX)
    whole = projections.project_query(case.inputs, case.projection, case.transform, *shared)
    part = type(case.inputs)(case.inputs.qdata[:, rows:], case.inputs.scale[:, rows:])
    window = projections.project_query(
        part, case.projection, case.transform.rows(rows, 193), *shared
    )
    for name, ours, theirs, step in zip(
        ("codes", "scales", "summaries"), window, whole, (1, 32, 64), strict=True
    ):
        assert torch.equal(ours, theirs[:, :, rows // step :]), name


def test_operators_pass_opcheck():
    case = operands(70, heads=1, head_dim=64, rotary=64, features=16)
    extra, rows, values = options(case), rows_of(case), values_of(case)
    lengths = operands(128, heads=1, head_dim=64, rotary=64, features=16, lengths=[3, 64])
    checks = ("test_schema", "test_faketensor")
    for operator, arguments, named in (
        (sparse.project_query, (*rows, SCALE, MINMAX), extra),
        (sparse.project_query, (*rows_of(lengths), SCALE, MEAN, lengths.lengths), extra),
        (sparse.project_key, (*rows, MINMAX), extra),
        (sparse.project_key, (*rows, MEAN), extra),
        (sparse_value.project_value, values, extra),
        (sparse_value.project_value_with_block_means, values, extra),
        (dense.project_query, (*rows, SCALE), extra | {"qk_quantization": "per_thread"}),
        (dense.project_key, rows, extra),
        (dense.project_value, values, extra),
        (dense.project_value, (*values[:2], None, *values[3:]), extra),
    ):
        torch.library.opcheck(operator, arguments, named, test_utils=checks)
