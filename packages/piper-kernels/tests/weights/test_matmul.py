import pytest
import torch
from torch.nn import functional

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

PRODUCTS = {
    "matmul_operator": lambda x, w: x @ w,
    "matmul": torch.matmul,
    "tensor_matmul": lambda x, w: x.matmul(w),
    "mm": torch.mm,
    "tensor_mm": lambda x, w: x.mm(w),
    "aten_mm": torch.ops.aten.mm.default,
    "aten_matmul": torch.ops.aten.matmul.default,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_a_transposed_weight_are_linear(weight, name):
    x = torch.randn(5, 32)
    assert torch.equal(PRODUCTS[name](x, weight.t()), functional.linear(x, weight))


@pytest.mark.parametrize("shape", [(32,), (1, 32), (2, 3, 32), (0, 32), (2, 0, 5, 32)])
def test_matmul_takes_any_rank(weight, shape):
    x = torch.randn(shape)
    result = x @ weight.t()
    assert result.shape == (*shape[:-1], 7)
    assert torch.equal(result, functional.linear(x, weight))


def test_matmul_takes_strided_activations(weight):
    x = torch.randn(32, 10).t()[::2]
    assert torch.equal(x @ weight.t(), functional.linear(x.contiguous(), weight))


@pytest.mark.parametrize("function", [torch.addmm, torch.ops.aten.addmm.default])
def test_addmm_is_linear_with_bias(weight, function):
    x, bias = torch.randn(5, 32), torch.randn(7)
    expected = functional.linear(x, weight, bias)
    assert torch.equal(function(bias, x, weight.t()), expected)
    assert torch.equal(function(bias, x, weight.t(), beta=1, alpha=1.0), expected)


@pytest.mark.parametrize("scalars", [{"alpha": 2}, {"beta": 0}, {"alpha": 0.5, "beta": 2}])
def test_addmm_coefficients(weight, scalars):
    with pytest.raises(NotImplementedError, match="quantized addmm requires"):
        torch.addmm(torch.zeros(7), torch.zeros(5, 32), weight.t(), **scalars)


@pytest.mark.parametrize("shape", [(1,), (5, 7), (1, 7), ()])
def test_addmm_bias_shape(weight, shape):
    with pytest.raises(NotImplementedError, match="quantized addmm requires"):
        torch.ops.aten.addmm.default(torch.zeros(shape), torch.zeros(5, 32), weight.t())


@pytest.mark.parametrize("name", PRODUCTS)
def test_untransposed_weights_are_refused(make_weight, name):
    square = make_weight(rows=32, features=32)
    with pytest.raises(NotImplementedError, match="transposed"):
        PRODUCTS[name](torch.zeros(5, 32), square)


def test_transposed_weight_in_linear_is_refused(make_weight):
    square = make_weight(rows=32, features=32)
    with pytest.raises(NotImplementedError, match="transposed"):
        functional.linear(torch.zeros(5, 32), square.t())


def test_weight_on_the_left_is_refused(make_weight):
    square = make_weight(rows=32, features=32)
    with pytest.raises(NotImplementedError, match="right operand"):
        square @ torch.zeros(32, 5)
    with pytest.raises(NotImplementedError, match="right operand"):
        square @ square.t()
    with pytest.raises(NotImplementedError, match="as its weight only"):
        functional.linear(square, torch.zeros(32, 32))


def test_mm_needs_two_dimensions(weight):
    for shape in ((32,), (2, 3, 32)):
        with pytest.raises(ValueError, match="2-D activation"):
            torch.ops.aten.mm.default(torch.zeros(shape), weight.t())
    with pytest.raises(ValueError, match="2-D activation"):
        torch.ops.aten.addmm.default(torch.zeros(7), torch.zeros(1, 5, 32), weight.t())


def test_out_is_refused(weight):
    with pytest.raises(NotImplementedError):
        torch.matmul(torch.zeros(5, 32), weight.t(), out=torch.empty(5, 7))


def test_batched_products_are_refused(weight):
    with pytest.raises(NotImplementedError):
        torch.ops.aten.bmm.default(torch.zeros(1, 5, 32), weight)


@pytest.mark.parametrize("name", ["matmul_operator", "matmul", "mm"])
def test_products_compile(weight, name):
    compiled = torch.compile(
        lambda x, w: PRODUCTS[name](x, w.t()), backend="aot_eager", fullgraph=True
    )
    x = torch.randn(5, 32)
    assert torch.equal(compiled(x, weight), functional.linear(x, weight))


def test_result_is_dense(weight):
    assert type(torch.zeros(2, 32) @ weight.t()) is torch.Tensor
    assert isinstance(weight, ConvRotInt8Tensor)
