"""Fuzz of ``PiperNVFP4Tensor`` and ``ConvRotNVFP4Tensor`` against float64 references."""

import math

import torch
from fuzz_cases import DTYPES, cases, fuzz, lay_out, run_case
from fuzz_reference import (
    EPS,
    assert_nvfp4_codes,
    assert_rounded,
    nvfp4_stored,
    rotate,
)
from fuzz_wrappers import assert_same_storage, inner_tensors, same_bytes, wrapper_checks
from hypothesis import given
from torch.nn import functional as F
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor


def weight_of(case, dense):
    """Quantize ``dense`` with the scale levels, layout and nibble order of the case."""
    options = {
        "compute_per_tensor_scale": bool(case.option & 1),
        "is_swizzled_scales": bool(case.option & 2),
        "act_per_tensor_scale": torch.tensor(0.5) if case.option & 8 else None,
    }
    if case.group:
        weight = ConvRotNVFP4Tensor.from_hp(dense, group_size=case.group, **options)
    else:
        weight = PiperNVFP4Tensor.from_hp(dense, **options)
    if not case.option & 4:
        return weight
    names, attributes = weight.__tensor_flatten__()
    inner = {name: getattr(weight, name) for name in names}
    inner["qdata"] = (weight.qdata & 15) << 4 | weight.qdata >> 4
    attributes = attributes | {"high_first": True}
    return type(weight).__tensor_unflatten__(inner, attributes, None, None)


def make_weight(case):
    return weight_of(case, case.dense())


def magnitude_of(dense, group):
    if not group:
        return dense.double().abs().amax(-1, keepdim=True)
    rows, features = dense.shape
    norms = dense.double().reshape(rows, features // group, group).norm(dim=-1)
    return norms.amax(-1, keepdim=True)


def check_quantize(case):
    dense = case.dense()
    weight = weight_of(case, dense)
    assert (weight.shape, weight.dtype) == (dense.shape, dense.dtype)
    assert weight.transposed is False
    assert_nvfp4_codes(
        weight,
        rotate(dense, case.group),
        magnitude_of(dense, case.group),
        case.group,
        computed_level=bool(case.option & 1),
    )


def check_given_level(case):
    dense = case.dense()
    level = torch.tensor(math.ldexp(1 + case.option / 256, case.seed % 40 - 20))
    kind = ConvRotNVFP4Tensor if case.group else PiperNVFP4Tensor
    options = {"group_size": case.group} if case.group else {}
    weight = kind.from_hp(
        dense, per_tensor_scale=level, is_swizzled_scales=bool(case.option & 2), **options
    )
    assert weight.per_tensor_scale is level
    assert_nvfp4_codes(
        weight,
        rotate(dense, case.group),
        magnitude_of(dense, case.group),
        case.group,
        computed_level=False,
    )


def check_dequantize(case):
    weight = make_weight(case)
    stored = nvfp4_stored(weight)
    for dtype in (None, *DTYPES.values()):
        actual = weight.dequantize(dtype)
        assert actual.dtype == (dtype or case.torch_dtype)
        assert_dequantized(actual, stored, case.group)
    scales = weight.get_hp_scales().double().repeat_interleave(16, -1)
    assert scales.shape == weight.shape
    assert ((stored.abs() <= 6 * scales * (1 + EPS)) | (stored == 0)).all()


def assert_dequantized(actual, stored, group):
    """Stored values are rounded to the output dtype, then rotated back in that dtype."""
    dtype = actual.dtype
    amax = stored.abs().amax(-1, keepdim=True)
    if not group:
        assert_rounded(actual, stored, amax, dtype, 1)
        return
    rounded = stored.float().to(dtype).double()
    fits = rounded.isfinite().reshape(-1, group).all(-1, keepdim=True)
    fits = fits.expand(-1, group).reshape(actual.shape)
    exact = rotate(rounded.nan_to_num(0, 0, 0), group)
    size = amax.expand_as(exact)
    assert_rounded(actual[fits], exact[fits], size[fits], dtype, group)


def check_to(case):
    weight = make_weight(case)
    target = list(DTYPES.values())[case.option // 16 % 3]
    assert weight.to(weight.dtype) is weight
    moved = weight.to(target)
    assert (moved.dtype, moved.orig_dtype) == (target, target)
    for name, inner in inner_tensors(weight).items():
        assert getattr(moved, name) is inner
    assert_dequantized(moved.dequantize(), nvfp4_stored(weight), case.group)
    copied = weight.to(target, copy=True)
    assert copied.qdata.data_ptr() != weight.qdata.data_ptr()
    assert_same_storage(copied, moved)
    assert weight.to("meta").scale.device.type == "meta"


def check_torchao(case):
    """The bytes of TorchAO, which takes no FP16 source, and its tensors without a copy."""
    dense = rotate_fp32(case.dense().float(), case.group)
    if not dense.abs().amax().isfinite():
        return
    weight = PiperNVFP4Tensor.from_hp(
        dense,
        compute_per_tensor_scale=bool(case.option & 1),
        is_swizzled_scales=bool(case.option & 2),
    )
    theirs = NVFP4Tensor.to_nvfp4(
        dense.contiguous(),
        per_tensor_scale=weight.per_tensor_scale,
        is_swizzled_scales=bool(case.option & 2),
    )
    assert torch.equal(weight.qdata, theirs.qdata)
    assert same_bytes(weight.scale.reshape(-1), theirs.scale.reshape(-1))
    if case.group:
        wrapped = ConvRotNVFP4Tensor.from_torchao(theirs, group_size=case.group)
    else:
        wrapped = PiperNVFP4Tensor.from_torchao(theirs)
    assert wrapped.qdata is theirs.qdata
    assert wrapped.scale is theirs.scale
    assert_dequantized(wrapped.dequantize(), nvfp4_stored(weight), case.group)


def rotate_fp32(values, group):
    return rotate(values, group).float()


def check_linear(case):
    generator = case.generator()
    dense = case.matrix(case.rows, generator)
    if case.values in ("huge", "mixed rows"):
        dense = case.matrix(case.rows, generator, "outlier row")
    weight = weight_of(case, dense)
    lead = ((5,), (), (2, 3), (1, 1), (0,), (33,))[case.seed % 6]
    count = torch.Size(lead).numel()
    x = lay_out(case.matrix(max(count, 1), generator, "normal"), case.layout)[:count]
    bias = torch.randn(case.rows, generator=generator).to(x.dtype) if case.option & 16 else None
    kept = weight.dequantize().double()
    if not kept.isfinite().all():
        return
    exact = x.double() @ kept.t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ kept.abs().t() + exact.abs()
    with torch.no_grad():
        if case.option & 32 and bias is None and count:
            actual = x @ weight.t()
        else:
            actual = F.linear(x.reshape(*lead, case.features), weight, bias)
            assert actual.shape == (*lead, case.rows)
    actual = actual.reshape(count, case.rows).double()
    eps = torch.finfo(x.dtype).eps
    # Dense products may take subnormal weights and summands as zero.
    flushed = torch.finfo(torch.float32).tiny * (x.double().abs().sum(-1, True) + case.features)
    wrong = (actual - exact).abs() > 4 * eps * size + flushed
    assert not wrong.any(), (actual[wrong][:8], exact[wrong][:8])


def check_add(case):
    weight = make_weight(case)
    kinds = ("normal", "tiny", "outlier column", "zeros", "sparse")
    update = case.matrix(case.rows, case.generator(), kinds[case.seed % len(kinds)])
    alpha = (1, -1, 0.25, 3, 0.001)[case.seed // 8 % 5]
    seed = case.seed if case.option & 16 else None
    base = nvfp4_stored(weight)
    merged = base + alpha * rotate(update, case.group)
    size = base.abs().amax(-1, keepdim=True) + abs(alpha) * magnitude_of(update, case.group)
    assert_updated(case, weight, merged, size, seed, lambda: weight.add_(
        lay_out(update, case.layout) if case.layout != "one row repeated" else update,
        alpha=alpha,
        rounding_seed=seed,
    ))  # fmt: skip


def check_addmm(case):
    weight = make_weight(case)
    generator = case.generator()
    rank = (0, 1, 3, 8)[case.seed % 4]
    beta, alpha = ((1, 1), (0, 1), (0.5, -2), (2, 0), (1, 0.125))[case.seed // 8 % 5]
    seed = case.seed if case.option & 16 else None
    mat1 = torch.randn(case.rows, rank, generator=generator).to(case.torch_dtype)
    mat2 = torch.randn(rank, case.features, generator=generator).to(case.torch_dtype)
    base = nvfp4_stored(weight)
    merged = beta * base + alpha * mat1.double() @ rotate(mat2, case.group)
    size = beta * base.abs().amax(-1, keepdim=True)
    size = size + abs(alpha) * (mat1.double().abs() @ magnitude_of(mat2, case.group))
    assert_updated(case, weight, merged, size, seed, lambda: weight.addmm_(
        mat1, lay_out(mat2, "transposed"), beta=beta, alpha=alpha, rounding_seed=seed
    ))  # fmt: skip


def assert_updated(case, weight, merged, size, seed, update):
    inner = inner_tensors(weight)
    assert update() is weight
    for name, tensor in inner.items():
        assert getattr(weight, name) is tensor
    assert_nvfp4_codes(
        weight,
        merged,
        size,
        case.group,
        computed_level=bool(case.option & 1),
        stochastic=seed is not None,
    )


OPERATIONS = {
    "quantize": check_quantize,
    "given level": check_given_level,
    "dequantize": check_dequantize,
    "to": check_to,
    "torchao": check_torchao,
    "linear": check_linear,
    "add": check_add,
    "addmm": check_addmm,
    **wrapper_checks(make_weight),
}


@fuzz(share=0.25)
@given(case=cases(sorted(OPERATIONS), groups=(0,)))
def test_random_nvfp4_cases(case):
    run_case(OPERATIONS, case, __file__)


@fuzz(share=0.25)
@given(case=cases(sorted(OPERATIONS)))
def test_random_convrot_nvfp4_cases(case):
    run_case(OPERATIONS, case, __file__)
