import pytest
import torch

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

SAME_SHAPE = {
    "view": lambda w: w.view(7, 32),
    "view_inferred": lambda w: w.view(-1, 32),
    "view_inferred_last": lambda w: w.view(7, -1),
    "view_size": lambda w: w.view(w.shape),
    "view_as": lambda w: w.view_as(torch.empty(7, 32)),
    "reshape": lambda w: w.reshape(7, 32),
    "detach": lambda w: w.detach(),
    "alias": torch.ops.aten.alias.default,
    "as_strided": lambda w: w.as_strided((7, 32), (32, 1)),
    "as_strided_offset": lambda w: w.as_strided((7, 32), (32, 1), 0),
    "permute": lambda w: w.permute(0, 1),
    "transpose": lambda w: w.transpose(1, -1),
}
TRANSPOSES = {
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "transpose": lambda w: w.transpose(0, 1),
    "transpose_negative": lambda w: w.transpose(-1, -2),
    "swapaxes": lambda w: w.swapaxes(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "permute_negative": lambda w: w.permute(-1, -2),
    "as_strided": lambda w: w.as_strided((32, 7), (1, 32)),
}


def assert_shares_storage(view, weight):
    assert type(view) is ConvRotInt8Tensor
    assert view is not weight
    assert view.group_size == weight.group_size
    assert view.dtype == weight.dtype
    for name in weight.__tensor_flatten__()[0]:
        inner, source = getattr(view, name), getattr(weight, name)
        assert inner is not source
        assert inner.data_ptr() == source.data_ptr()
    assert torch._C._is_alias_of(view, weight)


@pytest.mark.parametrize("name", SAME_SHAPE)
@pytest.mark.parametrize("act", [None, torch.tensor(0.5)])
def test_same_shape_views_alias(make_weight, name, act):
    weight = make_weight(act=act)
    if name == "reshape":
        # Torch returns the tensor itself or a view of it, as it likes.
        view = SAME_SHAPE[name](weight)
        assert view.qdata.data_ptr() == weight.qdata.data_ptr()
        return
    view = SAME_SHAPE[name](weight)
    assert_shares_storage(view, weight)
    assert view.shape == weight.shape
    assert view.stride() == weight.stride()
    assert view.transposed is False


@pytest.mark.parametrize("name", TRANSPOSES)
@pytest.mark.parametrize("act", [None, torch.tensor(0.5)])
def test_transposes_flip_the_flag_and_share_storage(make_weight, name, act):
    weight = make_weight(act=act)
    view = TRANSPOSES[name](weight)
    assert_shares_storage(view, weight)
    assert view.transposed is True
    assert view.shape == (32, 7)
    assert view.stride() == (1, 32)
    assert not view.is_contiguous()
    assert torch.equal(view.dequantize(), weight.dequantize().t())
    back = view.t()
    assert back.transposed is False
    assert (back.shape, back.stride()) == (weight.shape, weight.stride())


@pytest.mark.parametrize("rows", [0, 1, 17])
def test_transposing_empty_and_single_rows(make_weight, rows):
    weight = make_weight(rows=rows)
    assert weight.t().shape == (32, rows)
    assert weight.t().t().shape == (rows, 32)
    assert torch.equal(weight.t().dequantize(), weight.dequantize().t())


def test_views_of_a_transpose_keep_the_flag(weight):
    transposed = weight.t()
    for view in (
        transposed.view(32, 7),
        transposed.detach(),
        transposed.as_strided((32, 7), (1, 32)),
        transposed.clone(),
        transposed.to(torch.bfloat16),
        transposed.to(torch.float32, copy=True),
    ):
        assert view.transposed
        assert view.shape == (32, 7)


@pytest.mark.parametrize("shape", [(32, 7), (224,), (-1,), (7, 2, 16), (1, 7, 32)])
def test_other_views_are_refused(weight, shape):
    with pytest.raises(NotImplementedError, match="only supports same-shape views"):
        weight.view(*shape)


@pytest.mark.parametrize("shape", [(7, 31), (-1, 31), (-1, -1), (7, -2), (0, -1)])
def test_invalid_views_are_runtime_errors(weight, shape):
    with pytest.raises(RuntimeError):
        weight.view(*shape)


def test_ambiguous_view(make_weight):
    with pytest.raises(RuntimeError, match="ambiguous"):
        make_weight(rows=0).view(0, -1)


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [((7, 16), (32, 1), None), ((7, 32), (32, 1), 1), ((32, 7), (32, 1), None)],
)
def test_other_strides_are_refused(weight, size, stride, offset):
    with pytest.raises(NotImplementedError, match="unchanged layout or a matrix transpose"):
        weight.as_strided(size, stride, offset)


def test_dimension_errors(weight):
    with pytest.raises(IndexError):
        weight.transpose(0, 2)
    with pytest.raises((IndexError, ValueError)):
        weight.permute(0, 3)
    with pytest.raises((ValueError, RuntimeError)):
        weight.permute(0, 0)


def test_conv3d_weights_have_no_transpose():
    weight = ConvRotInt8Tensor.from_hp(torch.randn(3, 64, 3, 3, 3), group_size=16)
    assert weight.view(3, 64, 3, 3, 3).qdata.data_ptr() == weight.qdata.data_ptr()
    for transpose in (lambda w: w.transpose(0, 1), lambda w: w.permute(1, 0, 2, 3, 4)):
        with pytest.raises(NotImplementedError, match="matrices only"):
            transpose(weight)


@pytest.mark.parametrize(
    "function",
    [
        lambda w: w[0],
        lambda w: w[:2],
        lambda w: w[:, :16],
        lambda w: w.narrow(0, 0, 2),
        lambda w: w.select(0, 1),
    ],
)
def test_indexing_is_refused(weight, function):
    with pytest.raises(NotImplementedError, match="cannot be indexed or sliced"):
        function(weight)


def test_unknown_operators_name_the_way_out(weight):
    with pytest.raises(NotImplementedError, match=r"dequantize\(\)"):
        weight.exp()


@pytest.mark.parametrize("function", [lambda w: w.view(7, 32), lambda w: w.t(), lambda w: w.mT])
def test_views_compile(weight, function):
    compiled = torch.compile(
        lambda w: function(w).dequantize(), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(weight), function(weight).dequantize())
