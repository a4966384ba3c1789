import pytest
import torch
from torch.nn import functional


@pytest.fixture
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def outside(make_weight):
    """A weight made outside of inference mode."""
    return make_weight(act=torch.tensor(0.5))


@pytest.mark.parametrize(
    "function",
    [
        lambda w: w.to(torch.float32),
        lambda w: w.to(torch.float32, non_blocking=True),
        lambda w: w.to("cpu"),
        lambda w: w.to("cpu", torch.float32),
        lambda w: w.to(torch.empty(0)),
        lambda w: w.float(),
        lambda w: w.type_as(torch.empty(0)),
    ],
)
def test_unchanged_to_returns_the_weight(outside, inference, function):
    assert function(outside) is outside


@pytest.mark.parametrize(
    "function",
    [
        lambda w: w.to(torch.bfloat16),
        lambda w: w.to("cpu", torch.bfloat16),
        lambda w: w.to(device="cpu", dtype=torch.bfloat16),
        lambda w: torch.ops.aten.to.dtype_layout(w, dtype=torch.bfloat16),
        lambda w: w.bfloat16(),
        lambda w: w.half().bfloat16(),
    ],
)
def test_dtype_change_reuses_storage(outside, inference, function):
    result = function(outside)
    assert result.dtype == torch.bfloat16
    assert result.qdata is outside.qdata
    assert result.act_per_tensor_scale is outside.act_per_tensor_scale


@pytest.mark.parametrize(
    "function",
    [
        lambda w: w.view(7, 32),
        lambda w: w.view_as(torch.empty(7, 32)),
        lambda w: w.detach(),
        lambda w: w.t(),
        lambda w: w.mT,
        lambda w: w.transpose(0, 1),
        lambda w: w.permute(1, 0),
        lambda w: w.as_strided((7, 32), (32, 1)),
    ],
)
def test_views_of_a_normal_weight_stay_normal(outside, inference, function):
    view = function(outside)
    assert not view.is_inference()
    assert not view.qdata.is_inference()
    assert view.qdata.data_ptr() == outside.qdata.data_ptr()


def test_products_agree_with_normal_mode(outside):
    x, bias = torch.randn(5, 32), torch.randn(7)
    expected = functional.linear(x, outside, bias)
    with torch.inference_mode():
        assert torch.equal(functional.linear(x, outside, bias), expected)
        assert torch.equal(torch.addmm(bias, x, outside.t()), expected)
        assert torch.equal(x @ outside.t() + bias, expected)
        assert torch.equal(torch.ops.aten.linear.default(x, outside, bias), expected)


def test_weights_made_inside(make_weight):
    with torch.inference_mode():
        weight = make_weight()
        assert weight.is_inference()
        result = functional.linear(torch.ones(1, 32), weight.t().t())
    with torch.no_grad():
        assert torch.equal(functional.linear(torch.ones(1, 32), weight), result)


def test_updates_work_inside(outside):
    before = outside.dequantize()
    with torch.inference_mode():
        outside.add_(torch.ones(7, 32))
        assert not torch.equal(outside.dequantize(), before)
