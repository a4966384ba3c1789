"""Views, casts, copies and products of NVFP4 weights of both classes in every layout."""

import pytest
import torch
from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

SAME_SHAPE = {
    "view": lambda w: w.view(7, 64),
    "view_inferred": lambda w: w.view(-1, 64),
    "view_as": lambda w: w.view_as(torch.empty(7, 64)),
    "detach": lambda w: w.detach(),
    "alias": torch.ops.aten.alias.default,
    "as_strided": lambda w: w.as_strided((7, 64), (64, 1)),
    "permute": lambda w: w.permute(0, 1),
    "transpose": lambda w: w.transpose(1, -1),
}
TRANSPOSES = {
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "transpose": lambda w: w.transpose(0, 1),
    "transpose_negative": lambda w: w.transpose(-1, -2),
    "permute": lambda w: w.permute(1, 0),
    "as_strided": lambda w: w.as_strided((64, 7), (1, 64)),
}


def inner_names(weight):
    return weight.__tensor_flatten__()[0]


def assert_shares_storage(view, weight):
    assert type(view) is type(weight)
    assert view is not weight
    assert view.__tensor_flatten__() == weight.__tensor_flatten__()
    for name in inner_names(weight):
        inner, source = getattr(view, name), getattr(weight, name)
        assert inner is not source
        assert inner.data_ptr() == source.data_ptr()
    assert torch._C._is_alias_of(view, weight)


@pytest.mark.parametrize("name", SAME_SHAPE)
def test_same_shape_views_alias(weight, name):
    view = SAME_SHAPE[name](weight)
    assert_shares_storage(view, weight)
    assert (view.shape, view.stride()) == (weight.shape, weight.stride())
    assert not view.transposed


@pytest.mark.parametrize("name", TRANSPOSES)
def test_transposes_share_storage(weight, name):
    view = TRANSPOSES[name](weight)
    assert_shares_storage(view, weight)
    assert view.transposed
    assert (view.shape, view.stride()) == ((64, 7), (1, 64))
    assert torch.equal(view.dequantize(), weight.dequantize().t())
    back = view.t()
    assert not back.transposed
    assert (back.shape, back.stride()) == (weight.shape, weight.stride())
    assert back.qdata.is_contiguous()
    assert back.scale.is_contiguous()


def test_views_of_a_transpose_stay_transposed(weight):
    transposed = weight.t()
    for view in (
        transposed.view(64, 7),
        transposed.detach(),
        transposed.clone(),
        transposed.to(torch.bfloat16),
        transposed.to(torch.float32, copy=True),
    ):
        assert view.transposed
        assert view.shape == (64, 7)
        assert torch.equal(view.t().dequantize(torch.float32), weight.dequantize(torch.float32))


@pytest.mark.parametrize("shape", [(64, 7), (448,), (-1,), (7, 4, 16)])
def test_other_views_are_refused(weight, shape):
    with pytest.raises(NotImplementedError, match="only supports same-shape views"):
        weight.view(*shape)


def test_other_strides_are_refused(weight):
    with pytest.raises(NotImplementedError, match="unchanged layout or a matrix transpose"):
        weight.as_strided((7, 32), (64, 1))


def test_ambiguous_view(make_weight):
    with pytest.raises(RuntimeError, match="ambiguous"):
        make_weight(rows=0).view(0, -1)


@pytest.mark.parametrize(
    "function", [lambda w: w[0], lambda w: w[:2], lambda w: w[:, :16], lambda w: w.narrow(0, 0, 2)]
)
def test_indexing_is_refused(weight, function):
    with pytest.raises(NotImplementedError, match="cannot be indexed or sliced"):
        function(weight)


def test_handlers_of_torchao_do_not_leak_through(weight):
    for name in ("bmm", "_grouped_mm"):
        with pytest.raises(NotImplementedError, match="does not support"):
            getattr(torch.ops.aten, name).default(torch.zeros(1, 5, 64), weight)
    with pytest.raises(NotImplementedError, match=r"dequantize\(\)"):
        weight.exp()


@pytest.mark.parametrize(
    "function",
    [
        lambda w: w.to(torch.bfloat16),
        lambda w: w.to("cpu", torch.bfloat16),
        lambda w: w.to(device="cpu", dtype=torch.bfloat16),
        lambda w: w.bfloat16(),
        lambda w: w.type_as(torch.empty(0, dtype=torch.bfloat16)),
        lambda w: w.to(torch.bfloat16, non_blocking=True),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_dtype_change_reuses_the_inner_tensors(make_weight, function, inference):
    weight = make_weight(act_per_tensor_scale=torch.tensor(0.5))
    with torch.inference_mode(inference):
        result = function(weight)
    assert type(result) is type(weight)
    assert result.dtype == result.orig_dtype == torch.bfloat16
    for name in inner_names(weight):
        assert getattr(result, name) is getattr(weight, name)


@pytest.mark.parametrize(
    "function",
    [
        lambda w: w.to(torch.float32),
        lambda w: w.to("cpu"),
        lambda w: w.to("cpu", torch.float32, non_blocking=True),
        lambda w: w.to(torch.empty(0)),
        lambda w: w.float(),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_unchanged_to_returns_the_weight(weight, function, inference):
    with torch.inference_mode(inference):
        assert function(weight) is weight


@pytest.mark.parametrize(
    "function",
    [
        lambda w: w.to(torch.float16, copy=True),
        lambda w: w.to(torch.float16, False, True),
        lambda w: w.to("cpu", torch.float16, False, True),
    ],
)
def test_explicit_copy_duplicates_every_inner_tensor(make_weight, function):
    weight = make_weight(act_per_tensor_scale=torch.tensor(0.5))
    result = function(weight)
    assert result.dtype == result.orig_dtype == torch.float16
    for name in inner_names(weight):
        assert getattr(result, name).data_ptr() != getattr(weight, name).data_ptr()
        assert torch.equal(getattr(result, name).float(), getattr(weight, name).float())


def test_device_moves_take_every_inner_tensor(make_weight):
    moved = make_weight(act_per_tensor_scale=torch.tensor(0.5)).to("meta")
    assert moved.device.type == "meta"
    assert all(getattr(moved, name).device.type == "meta" for name in inner_names(moved))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_other_logical_dtypes_are_refused(weight, dtype):
    with pytest.raises(TypeError, match="logical dtype"):
        weight.to(dtype)


def test_memory_formats(weight):
    assert weight.contiguous().qdata.data_ptr() == weight.qdata.data_ptr()
    assert weight.clone(memory_format=torch.contiguous_format).is_contiguous()
    for function in (
        lambda w: w.clone(memory_format=torch.contiguous_format),
        lambda w: w.contiguous(),
    ):
        with pytest.raises(NotImplementedError, match="transposed"):
            function(weight.t())


def test_copy_keeps_identities(make_weight):
    target = make_weight(act_per_tensor_scale=torch.tensor(0.5))
    source = make_weight(act_per_tensor_scale=torch.tensor(0.25))
    source.qdata.bitwise_not_()
    inner = [getattr(target, name) for name in inner_names(target)]
    assert target.copy_(source) is target
    assert all(
        getattr(target, name) is before
        for name, before in zip(inner_names(target), inner, strict=True)
    )
    assert torch.equal(target.dequantize(), source.dequantize())
    assert target.act_per_tensor_scale.item() == 0.25


def test_copy_needs_equal_metadata(plain):
    target = plain()
    before = target.qdata.clone()
    for change in (
        {"rows": 8},
        {"dtype": torch.float16},
        {"swizzled": True},
        {"two_level": False},
        {"high_first": True},
        {"act_per_tensor_scale": torch.tensor(1.0)},
        {"act_quant_kwargs": QuantizeTensorToNVFP4Kwargs()},
    ):
        with pytest.raises(ValueError, match="metadata mismatch"):
            target.copy_(plain(**change))
    square = plain(64, 64)
    with pytest.raises(ValueError, match="metadata mismatch"):
        square.copy_(plain(64, 64).t())
    with pytest.raises(ValueError, match="metadata mismatch"):
        plain(name="convrot", group_size=16).copy_(plain(name="convrot", group_size=64))
    assert torch.equal(target.qdata, before)


def test_copy_between_formats_names_the_alternative(plain):
    weight, rotated, dense = plain(), plain(name="convrot"), torch.zeros(7, 64)
    with pytest.raises(NotImplementedError, match=r"dense.copy_\(weight.dequantize\(\)\)"):
        dense.copy_(weight)
    with pytest.raises(NotImplementedError, match=r"PiperNVFP4Tensor\.from_hp"):
        weight.copy_(dense)
    with pytest.raises(NotImplementedError, match="into a PiperNVFP4Tensor"):
        weight.copy_(rotated)
    with pytest.raises(NotImplementedError, match="a PiperNVFP4Tensor into a ConvRotNVFP4Tensor"):
        rotated.copy_(weight)


def test_module_moves_and_pinning_queries(make_weight):
    linear = torch.nn.Linear(64, 7, bias=False)
    linear.weight = torch.nn.Parameter(make_weight(), requires_grad=False)
    assert linear.weight.is_pinned() is False
    linear.to(torch.float16)
    assert linear.weight.dtype == linear.weight.orig_dtype == torch.float16
    linear.to("meta")
    assert linear.weight.qdata.device.type == "meta"


@pytest.mark.gpu
def test_pinning_keeps_the_class(make_weight):
    pinned = make_weight(act_per_tensor_scale=torch.tensor(0.5)).pin_memory()
    assert pinned.is_pinned()
    assert all(getattr(pinned, name).is_pinned() for name in inner_names(pinned))
    assert torch.equal(pinned.dequantize(), make_weight().dequantize())
    device = pinned.to("cuda", non_blocking=True)
    assert type(device) is type(pinned)
    torch.testing.assert_close(device.dequantize().cpu(), pinned.dequantize())


@pytest.mark.parametrize(
    "function",
    [lambda w: w.view(7, 64), lambda w: w.detach(), lambda w: w.t(), lambda w: w.mT],
)
def test_views_in_inference_mode_stay_normal_tensors(weight, function):
    with torch.inference_mode():
        view = function(weight)
        assert not view.is_inference()
        assert not view.qdata.is_inference()
