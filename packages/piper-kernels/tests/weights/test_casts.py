import pytest
import torch

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

INNER = ("qdata", "scale", "act_per_tensor_scale")


@pytest.fixture
def static(make_weight):
    return make_weight(act=torch.tensor(0.5))


CAST_SPELLINGS = {
    "to": lambda w: w.to(torch.bfloat16),
    "to_keyword": lambda w: w.to(dtype=torch.bfloat16),
    "to_device_dtype": lambda w: w.to("cpu", torch.bfloat16),
    "bfloat16": lambda w: w.bfloat16(),
    "type_as": lambda w: w.type_as(torch.empty(0, dtype=torch.bfloat16)),
    "to_other": lambda w: w.to(torch.empty(0, dtype=torch.bfloat16)),
    "non_blocking": lambda w: w.to(torch.bfloat16, non_blocking=True),
    "no_copy": lambda w: w.to(torch.bfloat16, False, False),
}
SAME_SPELLINGS = {
    "to": lambda w: w.to(torch.float32),
    "to_device": lambda w: w.to("cpu"),
    "to_both": lambda w: w.to("cpu", torch.float32),
    "to_other": lambda w: w.to(torch.empty(0)),
    "non_blocking": lambda w: w.to(torch.float32, non_blocking=True),
    "float": lambda w: w.float(),
    "type_as": lambda w: w.type_as(torch.empty(0)),
}


@pytest.mark.parametrize("name", CAST_SPELLINGS)
def test_dtype_change_reuses_the_inner_tensors(static, name):
    result = CAST_SPELLINGS[name](static)
    assert result is not static
    assert result.dtype == torch.bfloat16
    for inner in INNER:
        assert getattr(result, inner) is getattr(static, inner)


@pytest.mark.parametrize("name", SAME_SPELLINGS)
def test_unchanged_dtype_and_device_return_the_weight(static, name):
    assert SAME_SPELLINGS[name](static) is static


@pytest.mark.parametrize(
    "function",
    [
        lambda w: w.to(torch.float16, copy=True),
        lambda w: w.to(torch.float16, False, True),
        lambda w: w.to("cpu", torch.float16, False, True),
        lambda w: w.to(torch.empty(0, dtype=torch.float16), copy=True),
    ],
)
def test_explicit_copy_duplicates_every_inner_tensor(static, function):
    result = function(static)
    assert result.dtype == torch.float16
    for inner in INNER:
        assert getattr(result, inner) is not getattr(static, inner)
        assert getattr(result, inner).data_ptr() != getattr(static, inner).data_ptr()
        assert torch.equal(getattr(result, inner), getattr(static, inner))


def test_explicit_copy_to_the_same_dtype(static):
    result = static.to(torch.float32, copy=True)
    assert result is not static
    assert result.qdata.data_ptr() != static.qdata.data_ptr()


def test_dense_to_a_weights_dtype_still_copies(make_weight):
    dense = torch.randn(3)
    target = make_weight()
    assert dense.to(target) is dense
    assert dense.to(target, copy=True).data_ptr() != dense.data_ptr()


def test_device_move_takes_the_activation_scale_along(static):
    moved = static.to("meta")
    assert moved.device.type == "meta"
    assert all(getattr(moved, inner).device.type == "meta" for inner in INNER)
    assert moved.to(torch.float16).dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_logical_dtypes_are_refused(weight, dtype):
    with pytest.raises(TypeError, match="logical dtype"):
        weight.to(dtype)


def test_memory_formats(weight):
    assert weight.clone(memory_format=torch.contiguous_format).is_contiguous()
    assert weight.contiguous().qdata.data_ptr() == weight.qdata.data_ptr()
    assert weight.to(torch.float16, memory_format=torch.contiguous_format).dtype == torch.float16
    with pytest.raises(NotImplementedError, match="contiguous_format only"):
        weight.clone(memory_format=torch.channels_last)
    transposed = weight.t()
    assert transposed.clone(memory_format=torch.preserve_format).transposed
    for function in (
        lambda w: w.clone(memory_format=torch.contiguous_format),
        lambda w: w.to(torch.float16, memory_format=torch.contiguous_format),
        lambda w: w.contiguous(),
        torch.ops.aten.contiguous.default,
    ):
        with pytest.raises(NotImplementedError, match="transposed"):
            function(transposed)


def test_unknown_keywords_are_refused(weight):
    with pytest.raises(NotImplementedError, match="pin_memory"):
        torch.ops.aten._to_copy.default(weight, pin_memory=True)
    with pytest.raises(NotImplementedError, match="strided layout"):
        torch.ops.aten._to_copy.default(weight, layout=torch.sparse_coo)


def test_copy_between_weights_keeps_identities(make_weight):
    target = make_weight(act=torch.tensor(0.5))
    source = make_weight(act=torch.tensor(0.25))
    source.qdata.neg_()
    inner = [getattr(target, name) for name in INNER]
    assert target.copy_(source) is target
    for name, before in zip(INNER, inner, strict=True):
        assert getattr(target, name) is before
        assert torch.equal(before, getattr(source, name))


def test_copy_between_dense_and_quantized_names_the_alternative(weight):
    dense = torch.zeros(7, 32)
    with pytest.raises(NotImplementedError, match=r"dense.copy_\(weight.dequantize\(\)\)"):
        dense.copy_(weight)
    with pytest.raises(NotImplementedError, match="from_hp"):
        weight.copy_(dense)
    assert torch.equal(dense, torch.zeros(7, 32))


@pytest.mark.parametrize(
    "change",
    [{"rows": 8}, {"features": 64}, {"dtype": torch.float16}, {"act": torch.tensor(1.0)}],
)
def test_copy_needs_equal_metadata(make_weight, weight, change):
    before = weight.qdata.clone()
    with pytest.raises(ValueError, match="metadata mismatch"):
        weight.copy_(make_weight(**change))
    assert torch.equal(weight.qdata, before)


def test_copy_refuses_a_transposed_source_of_the_same_shape(make_weight):
    square = make_weight(rows=32, features=32)
    with pytest.raises(ValueError, match="metadata mismatch"):
        square.copy_(make_weight(rows=32, features=32).t())


def test_module_moves(make_weight):
    linear = torch.nn.Linear(32, 7, bias=False)
    linear.weight = torch.nn.Parameter(make_weight(), requires_grad=False)
    linear.to(torch.float16)
    assert isinstance(linear.weight, ConvRotInt8Tensor)
    assert linear.weight.dtype == torch.float16
    linear.to("meta")
    assert linear.weight.qdata.device.type == "meta"
