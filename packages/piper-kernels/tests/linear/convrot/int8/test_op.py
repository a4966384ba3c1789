import pytest
import torch
from torch.nn import functional

from piper_kernels.linear.convrot import convrot_int8_linear
from piper_kernels.linear.convrot.int8 import reference
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def make(rows=7, features=64, dtype=torch.float32, act=None):
    dense = torch.randn(rows, features, generator=torch.Generator().manual_seed(4)).to(dtype)
    return ConvRotInt8Tensor.from_hp(dense, group_size=16, act_per_tensor_scale=act)


def expected_linear(x, weight, bias=None, activation=None):
    return reference.linear(
        x,
        weight.qdata,
        weight.scale,
        weight.group_size,
        bias,
        activation_fn=activation,
        input_scale=weight.act_per_tensor_scale,
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias_dtype", [None, *FLOATS])
@pytest.mark.parametrize("act", [None, torch.tensor(0.02)])
def test_functional_and_explicit_agree(dtype, bias_dtype, act):
    weight, x = make(dtype=dtype, act=act), torch.randn(5, 64).to(dtype)
    bias = None if bias_dtype is None else torch.randn(7).to(bias_dtype)
    expected = expected_linear(x, weight, bias)
    assert torch.equal(functional.linear(x, weight, bias), expected)
    assert torch.equal(convrot_int8_linear(x, weight, bias), expected)
    assert expected.dtype == dtype


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_activations(activation):
    weight = make()
    x = torch.randn(5, 128 if activation == "swiglu" else 64)
    result = convrot_int8_linear(x, weight, activation_fn=activation)
    assert torch.equal(result, expected_linear(x, weight, activation=activation))
    with pytest.raises(ValueError, match="activation_fn must be None"):
        convrot_int8_linear(x, weight, activation_fn="relu")


@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 3), (2, 0, 3)])
def test_leading_dimensions(lead):
    x = torch.randn(*lead, 64)
    assert functional.linear(x, make()).shape == (*lead, 7)


def test_quality_against_the_dense_linear():
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(96, 1024, generator=generator)
    dense[:, 3] *= 30
    x = torch.randn(33, 1024, generator=generator)
    x[:, 9] *= 50
    weight = ConvRotInt8Tensor.from_hp(dense, group_size=256)
    expected = x @ dense.t()
    error = (functional.linear(x, weight) - expected).norm() / expected.norm()
    assert error < 0.02


def test_strided_input_and_bias():
    weight = make()
    x, bias = torch.randn(64, 10).t()[::2], torch.randn(14)[::2]
    expected = functional.linear(x.contiguous(), weight, bias.contiguous())
    assert torch.equal(functional.linear(x, weight, bias), expected)


def test_static_scale_mutation_is_observed():
    act = torch.tensor(0.5)
    weight, x = make(act=act), torch.randn(5, 64)
    compiled = torch.compile(functional.linear, backend="aot_eager", fullgraph=True)
    for value in (0.5, 0.02):
        act.fill_(value)
        expected = expected_linear(x, weight)
        assert torch.equal(functional.linear(x, weight), expected)
        assert torch.equal(compiled(x, weight), expected)


def test_replaced_static_scale_is_checked_again():
    weight = make()
    weight.act_per_tensor_scale = torch.ones(1)
    with pytest.raises(ValueError, match="FP32 scalar"):
        functional.linear(torch.zeros(2, 64), weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_operands_and_the_logical_dtype(dtype):
    weight, x, bias = make(), torch.randn(5, 64), torch.randn(7)
    expected = expected_linear(x.to(dtype), weight, bias.to(dtype))
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(functional.linear(x, weight, bias), expected)
        assert torch.equal(convrot_int8_linear(x, weight, bias), expected)
        with pytest.raises(ValueError, match="logical dtype"):
            functional.linear(x.double(), weight)
    assert weight.dtype == torch.float32


def test_meta_validates_and_returns_a_shape():
    weight = make().to("meta")
    result = functional.linear(torch.empty(2, 3, 64, device="meta"), weight)
    assert (result.device.type, result.shape) == ("meta", (2, 3, 7))
    with pytest.raises(ValueError, match="expected 64 input features"):
        functional.linear(torch.empty(2, 63, device="meta"), weight)


@pytest.mark.parametrize(
    ("x", "bias", "error", "match"),
    [
        (torch.zeros(()), None, ValueError, "expected 64 input features, got 0"),
        (torch.zeros(2, 63), None, ValueError, "expected 64 input features, got 63"),
        (torch.zeros(2, 64, device="meta"), None, ValueError, "must share a device"),
        (torch.zeros(2, 64).half(), None, ValueError, "logical dtype"),
        (torch.zeros(2, 64, dtype=torch.int8), None, ValueError, "logical dtype"),
        (torch.zeros(2, 64).to_sparse(), None, ValueError, "strided layout"),
        (torch.zeros(2, 64), [0.0] * 7, TypeError, "bias must be a tensor"),
        (torch.zeros(2, 64), torch.zeros(1, 7), ValueError, "bias must have shape"),
        (torch.zeros(2, 64), torch.zeros(8), ValueError, "bias must have shape"),
        (torch.zeros(2, 64), torch.zeros(7, device="meta"), ValueError, "must share a device"),
        (
            torch.zeros(2, 64),
            torch.zeros(7).double(),
            ValueError,
            "must be FP16, BF16, or FP32",
        ),
        (
            torch.zeros(2, 64),
            torch.zeros(7).to_sparse(),
            ValueError,
            "bias must use strided layout",
        ),
    ],
)
def test_operand_refusals(x, bias, error, match):
    with pytest.raises(error, match=match):
        convrot_int8_linear(x, make(), bias)


def test_weight_refusals():
    x = torch.zeros(2, 64)
    with pytest.raises(TypeError, match="needs a ConvRotInt8Tensor weight, got Tensor"):
        convrot_int8_linear(x, torch.zeros(7, 64))
    with pytest.raises(NotImplementedError, match="transposed"):
        convrot_int8_linear(x, make().t())
    conv = ConvRotInt8Tensor.from_hp(torch.zeros(7, 64, 3, 3, 3), group_size=16)
    with pytest.raises(NotImplementedError, match="2-D weight"):
        convrot_int8_linear(x, conv)
    strided = make()
    strided.qdata = torch.zeros(7, 128, dtype=torch.int8)[:, ::2]
    with pytest.raises(ValueError, match="qdata and scale must be contiguous"):
        convrot_int8_linear(x, strided)


def test_autograd_is_refused_only_while_enabled():
    weight = make()
    x, bias = torch.zeros(2, 64, requires_grad=True), torch.zeros(7, requires_grad=True)
    for operands in ((x, None), (x.detach(), bias)):
        with pytest.raises(RuntimeError, match="does not support autograd"):
            convrot_int8_linear(operands[0], weight, operands[1])
        with pytest.raises(RuntimeError, match="does not support autograd"):
            functional.linear(operands[0], weight, operands[1])
        with torch.no_grad():
            assert functional.linear(operands[0], weight, operands[1]).shape == (2, 7)
    weight.scale.requires_grad_()
    with pytest.raises(RuntimeError, match="does not support autograd"):
        convrot_int8_linear(x.detach(), weight)


def test_in_a_module_under_compile():
    module = torch.nn.Linear(64, 7)
    module.weight = torch.nn.Parameter(make(), requires_grad=False)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for rows in (1, 5, 300):
            x = torch.randn(rows, 64)
            assert torch.equal(compiled(x), module(x))
