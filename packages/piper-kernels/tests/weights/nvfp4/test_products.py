"""Matrix products with NVFP4 weights of both classes in every layout."""

import pytest
import torch
from torch.nn import functional
from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

PRODUCTS = {
    "operator": lambda x, w: x @ w,
    "matmul": torch.matmul,
    "mm": torch.mm,
    "aten_mm": torch.ops.aten.mm.default,
    "aten_matmul": torch.ops.aten.matmul.default,
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("inference", [False, True])
def test_products_with_a_transposed_weight_are_linear(weight, name, inference):
    x = torch.randn(5, 64)
    with torch.inference_mode(inference):
        assert torch.equal(PRODUCTS[name](x, weight.t()), functional.linear(x, weight))


def test_addmm_is_linear_with_bias(weight):
    x, bias = torch.randn(5, 64), torch.randn(7)
    expected = functional.linear(x, weight, bias)
    assert torch.equal(torch.addmm(bias, x, weight.t()), expected)
    for options in ({"alpha": 2}, {"beta": 0}):
        with pytest.raises(NotImplementedError, match="quantized addmm requires"):
            torch.addmm(bias, x, weight.t(), **options)
    with pytest.raises(NotImplementedError, match="quantized addmm requires"):
        torch.addmm(torch.zeros(1), x, weight.t())


def test_wrong_operands_are_refused(make_weight):
    square = make_weight(64, 64)
    for product in PRODUCTS.values():
        with pytest.raises(NotImplementedError, match="transposed"):
            product(torch.zeros(5, 64), square)
    with pytest.raises(NotImplementedError, match="transposed"):
        functional.linear(torch.zeros(5, 64), square.t())
    with pytest.raises(NotImplementedError, match="right operand"):
        square @ torch.zeros(64, 5)
    with pytest.raises(NotImplementedError, match="right operand"):
        square @ square.t()
    with pytest.raises(NotImplementedError, match="as its weight only"):
        functional.linear(square, torch.zeros(64, 64))


def test_weights_made_in_inference_mode(make_weight):
    with torch.inference_mode():
        weight = make_weight()
        assert weight.is_inference()
        result = functional.linear(torch.ones(1, 64), weight.t().t())
    with torch.no_grad():
        assert torch.equal(functional.linear(torch.ones(1, 64), weight), result)


@pytest.mark.parametrize("kwargs", [None, QuantizeTensorToNVFP4Kwargs()])
def test_products_and_views_compile(plain, kwargs):
    x = torch.randn(5, 64)
    for name in ("nvfp4", "convrot"):
        weight = plain(name=name, swizzled=True, act_quant_kwargs=kwargs)
        for function in (
            functional.linear,
            lambda x, w: x @ w.t(),
            lambda x, w: w.view(7, 64).dequantize(),
            lambda x, w: w.mT.dequantize(),
        ):
            compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
            assert torch.equal(compiled(x, weight), function(x, weight))
