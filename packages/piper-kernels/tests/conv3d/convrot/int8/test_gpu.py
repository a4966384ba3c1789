"""Convolutions on a GPU against the reference on the CPU."""

from pathlib import Path

import pytest
import torch
from process_state import no_synchronization

from piper_kernels.conv3d.convrot.int8 import (
    ConvRotInt8Conv3d,
    _backend,
    conv3d,
    group_norm_silu_conv3d,
)
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
# Every case compiles four kernels; together they have each padding, group and branch.
CASES = [
    ((1, 64, 1, 3, 3), 1, "none", (1, 1, 1), torch.float16),
    ((2, 64, 3, 5, 7), 5, "reflect", (1, 1, 1), torch.float32),
    ((1, 128, 4, 33, 31), 130, "reflect_right", (2, 2, 2), torch.float16),
    ((1, 256, 3, 16, 64), 256, "reflect", (1, 1, 1), torch.float16),
    ((2, 512, 5, 9, 129), 65, "none", (3, 1, 2), torch.float16),
]


def make_weight(outputs, channels, device="cuda", seed=0):
    generator = torch.Generator().manual_seed(seed)
    qdata = torch.randint(-128, 128, (outputs, 3, 3, 3, channels), generator=generator)
    weight = ConvRotInt8Tensor.from_quantized(
        qdata.to(torch.int8),
        torch.rand(outputs, generator=generator) * 1e-4 + 1e-5,
        group_size=64 if channels <= 128 else 256,
        act_per_tensor_scale=torch.tensor(0.03125),
    )
    return weight if device == "cpu" else weight.to(device)


def whole_numbers(shape, seed=1):
    """Values whose rotation is exact, whatever the order of its additions."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).half() * 0.5


def uses_kernels():
    usable, reason = _backend.native_support(torch.device("cuda"))
    if not usable:
        pytest.skip(reason)


def test_numerics_of_the_kernels(run_kernel_checks):
    uses_kernels()
    run_kernel_checks(Path(__file__).with_name("triton_checks.py"), "cuda")


@pytest.mark.parametrize(("shape", "outputs", "padding", "stride", "dtype"), CASES)
def test_equals_the_reference(shape, outputs, padding, stride, dtype, nan_filled_allocations):
    """A contiguous input alone, a channels-last one with a strided residual."""
    uses_kernels()
    weight = make_weight(outputs, shape[1], "cpu")
    x = whole_numbers(shape).to(dtype)
    bias = torch.randn(2 * outputs).half()[::2]
    expected = conv3d(x, weight, bias, stride=stride, padding=padding)
    residual = torch.randn(expected.shape).half()
    with_residual = conv3d(x, weight, bias, stride=stride, padding=padding, residual=residual)
    weight, device_bias = weight.cuda(), torch.empty(2 * outputs, device="cuda").half()[::2]
    device_bias.copy_(bias)
    actual = conv3d(x.cuda(), weight, device_bias, stride=stride, padding=padding)
    assert torch.equal(actual.cpu(), expected)
    source = x.cuda().to(memory_format=torch.channels_last_3d)
    strided = residual.cuda().transpose(2, 3).contiguous().transpose(2, 3)
    actual = conv3d(source, weight, device_bias, stride=stride, padding=padding, residual=strided)
    assert torch.equal(actual.cpu(), with_residual)


@pytest.mark.parametrize(("channels", "last"), [(128, False), (512, True)])
def test_group_norm_and_silu(channels, last):
    uses_kernels()
    generator = torch.Generator().manual_seed(2)
    norm = torch.randn((2, channels), generator=generator)
    weight = make_weight(40, channels, "cpu")
    for offset in (0.0, 1000.0, -1000.0):
        x = torch.randn((1, channels, 2, 20, 24), generator=generator) * 0.5 + offset
        x = x.to(memory_format=torch.channels_last_3d) if last else x
        expected = group_norm_silu_conv3d(
            x, norm[0], norm[1], 32, 1e-6, weight, padding="reflect"
        ).float()
        on_device = norm.cuda()
        actual = group_norm_silu_conv3d(
            x.cuda(), on_device[0], on_device[1], 32, 1e-6, weight.cuda(), padding="reflect"
        )
        error = (actual.cpu().float() - expected).norm() / expected.norm()
        assert error < 4e-3, (offset, error)


def test_an_unaligned_filter():
    uses_kernels()
    weight = make_weight(20, 64)
    storage = torch.empty(weight.qdata.numel() + 1, dtype=torch.int8, device="cuda")
    unaligned = storage[1:].view(weight.qdata.shape).copy_(weight.qdata)
    assert unaligned.data_ptr() % 16
    other = ConvRotInt8Tensor.from_quantized(
        unaligned, weight.scale, group_size=64, act_per_tensor_scale=weight.act_per_tensor_scale
    )
    x = whole_numbers((1, 64, 2, 9, 10)).cuda()
    assert torch.equal(conv3d(x, other, padding="reflect"), conv3d(x, weight, padding="reflect"))


def test_is_captured_without_synchronization():
    uses_kernels()
    module = ConvRotInt8Conv3d(make_weight(70, 128), padding="reflect")
    x = whole_numbers((1, 128, 3, 12, 20)).cuda()
    expected = module(x)
    with no_synchronization():
        module(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = module(x)
    x.neg_()
    graph.replay()
    assert torch.equal(captured, module(x))
    assert not torch.equal(captured, expected)


def test_compiles_with_inductor():
    uses_kernels()
    module = ConvRotInt8Conv3d(make_weight(70, 128), padding="reflect")
    x = whole_numbers((1, 128, 2, 12, 20)).cuda()
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True)(x)
    assert torch.equal(compiled, module(x))


@pytest.mark.device_memory(gib=24)
@pytest.mark.parametrize(
    ("channels", "outputs", "size"),
    [(1024, 1024, (3, 1024, 700)), (64, 128, (17, 1024, 1024))],
    ids=["elements of a tensor", "elements between the outputs of a tile"],
)
def test_offsets_past_32_bits(channels, outputs, size, large_device_memory):
    """Codes, input and output, or the outputs of one tile, are over 2**31 elements apart."""
    uses_kernels()
    weight = make_weight(outputs, channels)
    x = torch.zeros((1, channels, *size), dtype=torch.float16, device="cuda")
    assert outputs * size[0] * size[1] * size[2] > 1 << 31
    corner = whole_numbers((1, channels, size[0], 5, 6)).cuda()
    x[..., -5:, -6:] = corner
    actual = conv3d(x, weight, padding="reflect")[..., -4:, -5:]
    expected = conv3d(corner, weight, padding="reflect")[..., -4:, -5:]
    assert torch.equal(actual, expected)
