import pytest
import torch
from torch.nn import functional
from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

from piper_kernels.linear.nvfp4 import reference
from piper_kernels.weights.convrot._rotation import build_hadamard
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
from piper_kernels.weights.nvfp4._layout import swap_packed_pairs

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
DYNAMIC = QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=True, use_dynamic_per_tensor_scale=True)
STATIC = QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=True)


def randn(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(rows=7, features=64, dtype=torch.float32, group_size=0, high_first=False, **options):
    options = {"compute_per_tensor_scale": True, "is_swizzled_scales": True, **options}
    dense = randn(rows, features, seed=2, dtype=dtype)
    if group_size:
        weight = ConvRotNVFP4Tensor.from_hp(dense, group_size=group_size, **options)
    else:
        weight = PiperNVFP4Tensor.from_hp(dense, **options)
    if high_first:
        weight.qdata, weight.high_first = swap_packed_pairs(weight.qdata), True
    return weight


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group_size", [0, 16, 64])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("high_first", [False, True])
@pytest.mark.parametrize("bias_dtype", [None, *FLOATS])
def test_weight_only_is_the_dequantized_linear(dtype, group_size, swizzled, high_first, bias_dtype):
    weight = make(
        dtype=dtype, group_size=group_size, high_first=high_first, is_swizzled_scales=swizzled
    )
    x = randn(2, 3, 64, dtype=dtype)
    bias = None if bias_dtype is None else randn(7, dtype=bias_dtype)
    result = functional.linear(x, weight, bias)
    assert result.dtype == dtype
    exact = x.double() @ weight.dequantize(torch.float32).double().t()
    exact = exact if bias is None else exact + bias.double()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), exact, rtol=4 * eps, atol=40 * eps)
    if dtype == bias_dtype and not group_size:
        assert torch.equal(result, functional.linear(x, weight.dequantize(), bias))


def test_rotated_half_weights_do_not_overflow():
    dense = (build_hadamard(256)[:4] * 480000).half()  # entries of 30000
    weight = ConvRotNVFP4Tensor.from_hp(dense, group_size=256, compute_per_tensor_scale=True)
    assert not weight.dequantize().isfinite().all()  # one value of 480000 when rotated
    result = functional.linear(torch.eye(256, dtype=torch.float16)[:2], weight)
    torch.testing.assert_close(result, dense.t()[:2], rtol=0.05, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group_size", [0, 64])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("high_first", [False, True])
@pytest.mark.parametrize("mode", ["dynamic", "static", "one_level"])
def test_quantized_inputs_use_the_reference(dtype, group_size, swizzled, high_first, mode):
    act = torch.tensor(0.002) if mode == "static" else None
    kwargs = DYNAMIC if mode == "dynamic" else STATIC
    options = {"act_per_tensor_scale": act, "act_quant_kwargs": kwargs}
    canonical = make(dtype=dtype, group_size=group_size, **options)
    weight = make(
        dtype=dtype,
        group_size=group_size,
        high_first=high_first,
        is_swizzled_scales=swizzled,
        **options,
    )
    x, bias = randn(3, 64, dtype=dtype), randn(7)
    expected = reference.linear(
        x,
        canonical.qdata,
        canonical.scale,
        canonical.per_tensor_scale,
        act,
        bias,
        mode == "dynamic",
        group_size=group_size,
    )
    result = functional.linear(x, weight, bias)
    assert torch.equal(result, expected)
    dense = functional.linear(x.float(), randn(7, 64, seed=2, dtype=dtype).float(), bias)
    assert (result - dense).norm() / dense.norm() < 0.25


@pytest.mark.parametrize("kwargs", [None, DYNAMIC])
@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (0, 64), (2, 0, 64)])
def test_leading_dimensions(kwargs, shape):
    weight = make(act_quant_kwargs=kwargs)
    result = functional.linear(randn(*shape), weight)
    assert result.shape == (*shape[:-1], 7)
    strided = randn(*shape, 2)[..., 0]
    assert torch.equal(
        functional.linear(strided, weight), functional.linear(strided.contiguous(), weight)
    )


@pytest.mark.parametrize("kwargs", [None, DYNAMIC])
def test_meta_operands(kwargs):
    weight = make(act_quant_kwargs=kwargs, group_size=16).to("meta")
    result = functional.linear(torch.zeros(2, 3, 64, device="meta"), weight)
    assert result.shape == (2, 3, 7)
    assert result.device.type == "meta"


@pytest.mark.parametrize("kwargs", [None, DYNAMIC])
def test_autocast_casts_the_operands(kwargs):
    weight = make(act_quant_kwargs=kwargs)
    x, bias = randn(3, 64), randn(7)
    expected = functional.linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(functional.linear(x, weight, bias), expected)


@pytest.mark.parametrize("kwargs", [None, DYNAMIC])
@pytest.mark.parametrize(
    ("x", "bias", "error", "match"),
    [
        (torch.zeros(2, 32), None, ValueError, "expected 64 input features, got 32"),
        (torch.zeros(()), None, ValueError, "expected 64 input features, got 0"),
        (torch.zeros(2, 64).half(), None, ValueError, "logical dtype"),
        (torch.zeros(2, 64, device="meta"), None, ValueError, "must share a device"),
        (torch.zeros(2, 64).to_sparse(), None, ValueError, "strided layout"),
        (torch.zeros(2, 64), torch.zeros(8), ValueError, "bias must have shape"),
        (torch.zeros(2, 64), torch.zeros(7).double(), ValueError, "must be FP16, BF16, or FP32"),
        (torch.zeros(2, 64), 1.0, TypeError, "bias.* must be"),
    ],
)
def test_operand_refusals(kwargs, x, bias, error, match):
    with pytest.raises(error, match=match):
        functional.linear(x, make(act_quant_kwargs=kwargs), bias)


def test_input_quantization_refusals():
    wide = QuantizeTensorToNVFP4Kwargs(block_size=32)
    with pytest.raises(ValueError, match="blocks of 16"):
        functional.linear(torch.zeros(2, 64), make(act_quant_kwargs=wide))
    for act in (torch.ones(2), torch.ones((), dtype=torch.float64)):
        weight = make(act_quant_kwargs=STATIC, act_per_tensor_scale=act)
        with pytest.raises(ValueError, match="FP32 scalar"):
            functional.linear(torch.zeros(2, 64), weight)


def test_autograd():
    x = randn(2, 64).requires_grad_()
    weight = make()
    functional.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.dequantize().sum(0).expand(2, 64))
    quantizing = make(act_quant_kwargs=DYNAMIC)
    with pytest.raises(RuntimeError, match="does not support autograd"):
        functional.linear(x, quantizing)
    with torch.no_grad():
        functional.linear(x, quantizing)


@pytest.mark.gpu
@pytest.mark.parametrize("kwargs", [None, DYNAMIC])
@pytest.mark.parametrize("group_size", [0, 64])
def test_cuda_agrees_with_the_cpu(kwargs, group_size):
    weight = make(130, 256, torch.bfloat16, group_size, act_quant_kwargs=kwargs)
    x = randn(5, 256, dtype=torch.bfloat16)
    expected = functional.linear(x, weight).float()
    actual = functional.linear(x.cuda(), weight.to("cuda")).float().cpu()
    assert (actual - expected).norm() / expected.norm() < 0.02
