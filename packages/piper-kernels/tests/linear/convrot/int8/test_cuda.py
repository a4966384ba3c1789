import pytest
import torch
from torch.nn import functional

from piper_kernels.linear.convrot import convrot_int8_linear
from piper_kernels.linear.convrot.int8 import reference
from piper_kernels.linear.convrot.int8._integer_matmul import integer_matmul
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.int8._quantization import dynamic_quantize_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("rows", [0, 1, 5, 16, 17, 33, 300])
@pytest.mark.parametrize(("depth", "columns"), [(16, 1), (64, 7), (1040, 8), (2048, 33), (64, 0)])
def test_integer_matmul_is_exact(rows, depth, columns):
    left = torch.randint(-128, 128, (rows, depth), dtype=torch.int8)
    right = torch.randint(-128, 128, (columns, depth), dtype=torch.int8)
    result = integer_matmul(left.cuda(), right.cuda())
    assert torch.equal(result.cpu().long(), left.long() @ right.long().t())


def test_row_scales_divide_exactly():
    rows = torch.rand(4096, 3) * 100
    for ours, expected in zip(
        dynamic_quantize_rows(rows.cuda()), dynamic_quantize_rows(rows), strict=True
    ):
        assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group_size", [16, 64, 256])
@pytest.mark.parametrize("act", [None, torch.tensor(0.5)])
def test_equals_the_cpu_on_integer_operands(dtype, group_size, act):
    generator = torch.Generator().manual_seed(group_size)
    dense = torch.randint(-8, 9, (13, 512), generator=generator).to(dtype)
    x = torch.randint(-8, 9, (2, 3, 512), generator=generator).to(dtype)
    bias = torch.randn(13, generator=generator).to(dtype)
    weight = ConvRotInt8Tensor.from_hp(dense, group_size=group_size, act_per_tensor_scale=act)
    moved = weight.to("cuda")
    assert all(getattr(moved, n).is_cuda for n in moved.__tensor_flatten__()[0])
    quantized = ConvRotInt8Tensor.from_hp(dense.cuda(), group_size=group_size)
    assert torch.equal(quantized.qdata.cpu(), weight.qdata)
    result = functional.linear(x.cuda(), moved, bias.cuda())
    assert torch.equal(result.cpu(), functional.linear(x, weight, bias))
    restored = moved.dequantize(torch.float32).cpu()
    torch.testing.assert_close(restored, weight.dequantize(torch.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_activations_stay_close_to_the_cpu(activation):
    weight = ConvRotInt8Tensor.from_hp(torch.randn(13, 256), group_size=64)
    x = torch.randn(5, 512 if activation == "swiglu" else 256)
    result = convrot_int8_linear(x.cuda(), weight.to("cuda"), activation_fn=activation)
    expected = convrot_int8_linear(x, weight, activation_fn=activation)
    assert (result.cpu() - expected).norm() / expected.norm() < 2e-3


def test_updates_and_seeds():
    weights = [ConvRotInt8Tensor.from_hp(torch.ones(7, 64), group_size=64) for _ in range(3)]
    cpu, first, second = weights[0], weights[1].to("cuda"), weights[2].to("cuda")
    mat1, mat2 = torch.randint(-4, 5, (7, 2)).float(), torch.randint(-4, 5, (2, 64)).float()
    state = torch.cuda.get_rng_state()
    for weight in (first, second):
        weight.addmm_(mat1.cuda(), mat2.cuda(), rounding_seed=2**64 - 1)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.equal(first.qdata, second.qdata)
    cpu.addmm_(mat1, mat2)
    torch.testing.assert_close(first.scale.cpu(), cpu.scale, rtol=2e-6, atol=0)
    assert (cpu.qdata.int() - first.qdata.cpu().int()).abs().max() <= 1


def test_is_capturable_in_a_cuda_graph():
    weight = ConvRotInt8Tensor.from_hp(torch.randn(64, 256), group_size=256).to("cuda")
    x = torch.randn(5, 256, device="cuda")
    with torch.inference_mode():
        expected = functional.linear(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = functional.linear(x, weight)
        x.mul_(2)
        graph.replay()
        assert torch.allclose(captured, 2 * expected, rtol=1e-5)
        codes, _ = reference.prepare_input(x, 256)
    assert codes.dtype == torch.int8
