"""Fuzz of ``ConvRotInt8Tensor`` against float64 references."""

import pytest
import torch
from fuzz_cases import DTYPES, cases, fuzz, lay_out, make_values, run_case
from fuzz_reference import (
    EPS,
    assert_int8_codes,
    assert_rounded,
    int8_dense,
    int8_scale,
    rotate,
)
from fuzz_wrappers import wrapper_checks
from hypothesis import given
from torch.nn import functional as F

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor


def make_weight(case):
    static = torch.tensor(0.25) if case.option & 64 else None
    return ConvRotInt8Tensor.from_hp(
        case.dense(), group_size=case.group, act_per_tensor_scale=static
    )


def quantized(case):
    dense = case.dense()
    return dense, ConvRotInt8Tensor.from_hp(dense, group_size=case.group)


def row_amax(values):
    return values.double().abs().amax(-1, keepdim=True)


def stored_magnitude(weight):
    return 127 * weight.group_size**0.5 * weight.scale.double()


def check_quantize(case):
    dense, weight = quantized(case)
    rotated = rotate(dense, case.group)
    group_norms = dense.double().reshape(case.rows, -1, case.group).norm(dim=-1)
    magnitude = group_norms.amax(-1, keepdim=True)
    assert_int8_codes(weight.qdata, weight.scale, rotated, magnitude, case.group)
    assert weight.shape == dense.shape
    assert weight.dtype == dense.dtype
    assert weight.qdata.is_contiguous()
    assert weight.scale.is_contiguous()
    # The round trip errs by at most half a step of each rotated value.
    restored = int8_dense(weight.qdata, weight.scale, case.group)
    error = (restored - dense.double()).norm(dim=-1, keepdim=True)
    step = int8_scale(rotated) * case.features**0.5
    assert (error <= 0.5 * step * (1 + 1e-3) + 16 * EPS * magnitude * case.features**0.5).all()


def check_dequantize(case):
    _, weight = quantized(case)
    exact = int8_dense(weight.qdata, weight.scale, case.group)
    for dtype in (None, *DTYPES.values()):
        dense = weight.dequantize(dtype)
        assert dense.dtype == (dtype or case.torch_dtype)
        assert_rounded(dense, exact, stored_magnitude(weight), dense.dtype, case.group)


def check_to(case):
    _, weight = quantized(case)
    target = list(DTYPES.values())[case.option % 3]
    assert weight.to(weight.dtype) is weight
    moved = weight.to(target)
    assert moved.dtype == target
    assert moved.qdata is weight.qdata or target == weight.dtype
    exact = int8_dense(weight.qdata, weight.scale, case.group)
    assert_rounded(moved.dequantize(), exact, stored_magnitude(weight), target, case.group)
    copied = weight.to(target, copy=True)
    assert copied.qdata.data_ptr() != weight.qdata.data_ptr()
    assert torch.equal(copied.qdata, weight.qdata)
    meta = weight.to("meta")
    assert (meta.shape, meta.qdata.device.type, meta.scale.device.type) == (
        weight.shape,
        "meta",
        "meta",
    )
    with pytest.raises(TypeError):
        weight.to(torch.float64)


def check_linear(case):
    _, weight = quantized(case)
    generator = case.generator()
    lead = ((5,), (), (2, 3), (1, 1), (0,), (33,))[case.option % 6]
    count = torch.Size(lead).numel()
    x = case.matrix(max(count, 1), generator, "normal" if case.option & 64 else case.values)
    if case.values == "huge":
        x = make_values("outlier column", max(count, 1), case.features, x.dtype, generator)
    x = lay_out(x, case.layout)[:count]
    bias_dtype = (None, *DTYPES.values())[case.option // 6 % 4]
    bias = None if bias_dtype is None else torch.randn(case.rows, generator=generator)
    bias = None if bias is None else bias.to(bias_dtype)
    rotated = rotate(x, case.group)
    scale = int8_scale(rotated)
    if case.option & 128:
        scale = torch.full_like(scale, (scale.max().item() if count else 1) * 0.7)
        scale = scale.float().double()
        weight.act_per_tensor_scale = scale.float()[0, 0].clone() if count else torch.tensor(1.0)
    ratio = rotated / scale
    codes = ratio.round().clamp(-128, 127)
    # Where the exact ratio is next to a boundary, FP32 may take the neighbouring code.
    norms = (
        x.double()
        .reshape(count, case.features // case.group, case.group)
        .norm(dim=-1)
        .amax(-1, keepdim=True)
    )
    slack = 8 * EPS * (case.group**0.5 * norms / scale + 127)
    unsure = ((ratio - ratio.floor() - 0.5).abs() <= slack).double()
    weights = weight.qdata.double() * weight.scale.double()
    exact = (codes * scale) @ weights.t() + (0 if bias is None else bias.double())
    size = (codes.abs() * scale) @ weights.abs().t() + exact.abs()
    size = size + (0 if bias is None else bias.double().abs())
    neighbour = (unsure * scale) @ weights.abs().t()
    with torch.no_grad():
        if case.option & 32 and count and bias is None:
            actual = x @ weight.t()
        else:
            actual = F.linear(x.reshape(*lead, case.features), weight, bias)
            assert actual.shape == (*lead, case.rows)
    actual = actual.reshape(count, case.rows)
    assert actual.dtype == x.dtype
    info = torch.finfo(x.dtype)
    allowed = neighbour + 64 * EPS * size + exact.abs() * info.eps + info.smallest_normal
    # The specified order (acc * x_scale) * w_scale may leave FP32 before the last factor.
    product = (codes @ weight.qdata.double().t()).abs() * scale
    overflow = exact.abs() + allowed >= info.max * (1 - info.eps)
    overflow |= product >= torch.finfo(torch.float32).max * 0.99
    close = (actual.double() - exact).abs() <= allowed
    assert (close | overflow).all(), (actual[~close], exact[~close])


def check_add(case):
    _, weight = quantized(case)
    update = lay_out(case.matrix(case.rows, case.generator(), kind_of_update(case)), case.layout)
    alpha = (1, -1, 0.25, 3, 0.001)[case.option % 5]
    seed = case.seed if case.option & 32 else None
    base = weight.qdata.double() * weight.scale.double()
    merged = base + alpha * rotate(update, case.group)
    magnitude = row_amax(base) + abs(alpha) * case.group**0.5 * row_amax(update)
    inner = (weight.qdata, weight.scale)
    assert weight.add_(update, alpha=alpha, rounding_seed=seed) is weight
    assert weight.qdata is inner[0]
    assert weight.scale is inner[1]
    assert_int8_codes(
        weight.qdata, weight.scale, merged, magnitude, case.group, stochastic=seed is not None
    )


def check_addmm(case):
    _, weight = quantized(case)
    generator = case.generator()
    rank = (0, 1, 3, 8)[case.option % 4]
    beta, alpha = ((1, 1), (0, 1), (0.5, -2), (2, 0), (1, 0.125))[case.option // 4 % 5]
    seed = case.seed if case.option & 128 else None
    mat1 = torch.randn(case.rows, rank, generator=generator).to(case.torch_dtype)
    mat2 = torch.randn(rank, case.features, generator=generator).to(case.torch_dtype)
    base = weight.qdata.double() * weight.scale.double()
    rotated = rotate(mat2, case.group)
    merged = beta * base + alpha * mat1.double() @ rotated
    magnitude = abs(beta) * row_amax(base) + abs(alpha) * case.group**0.5 * (
        mat1.double().abs() @ row_amax(mat2)
    )
    if beta == 0:
        weight.scale.fill_(torch.nan)
    weight.addmm_(mat1, lay_out(mat2, "transposed"), beta=beta, alpha=alpha, rounding_seed=seed)
    assert_int8_codes(
        weight.qdata, weight.scale, merged, magnitude, case.group, stochastic=seed is not None
    )


def kind_of_update(case):
    kinds = ("normal", "tiny", "outlier column", "zeros", "sparse")
    return kinds[case.option // 5 % len(kinds)]


def check_from_quantized(case):
    _, weight = quantized(case)
    scale = weight.scale.flatten() if case.option & 1 else weight.scale
    codes = lay_out(weight.qdata, "transposed") if case.option & 2 else weight.qdata
    wrapped = ConvRotInt8Tensor.from_quantized(
        codes, scale, group_size=case.group, logical_dtype=case.torch_dtype
    )
    assert torch.equal(wrapped.dequantize(), weight.dequantize())
    assert wrapped.scale.data_ptr() == weight.scale.data_ptr()
    if codes.is_contiguous():
        assert wrapped.qdata.data_ptr() == codes.data_ptr()


OPERATIONS = {
    "quantize": check_quantize,
    "dequantize": check_dequantize,
    "to": check_to,
    "linear": check_linear,
    "add": check_add,
    "addmm": check_addmm,
    "from_quantized": check_from_quantized,
    **wrapper_checks(make_weight),
}


@fuzz(share=0.5)
@given(case=cases(sorted(OPERATIONS)))
def test_random_cases(case):
    run_case(OPERATIONS, case, __file__)
