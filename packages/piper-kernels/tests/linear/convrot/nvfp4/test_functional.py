import pytest
import torch
from torch.nn import functional

from piper_kernels.linear.convrot.nvfp4 import convrot_nvfp4_linear
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor


def make(group_size=64):
    dense = torch.randn(7, 128, generator=torch.Generator().manual_seed(1))
    return ConvRotNVFP4Tensor.from_hp(dense, group_size=group_size, compute_per_tensor_scale=True)


@pytest.mark.parametrize("group_size", [16, 64])
def test_is_the_linear_of_the_weight(group_size):
    weight = make(group_size)
    x, bias = torch.randn(3, 128), torch.randn(7)
    expected = functional.linear(x, weight.dequantize(), bias)
    assert torch.equal(convrot_nvfp4_linear(x, weight, bias), expected)
    assert torch.equal(functional.linear(x, weight, bias), expected)


def test_needs_a_convrot_weight():
    plain = PiperNVFP4Tensor.from_hp(torch.randn(7, 128))
    for weight in (plain, torch.zeros(7, 128)):
        with pytest.raises(TypeError, match="needs a ConvRotNVFP4Tensor weight"):
            convrot_nvfp4_linear(torch.zeros(3, 128), weight)
    with pytest.raises(NotImplementedError, match="transposed=True"):
        convrot_nvfp4_linear(torch.zeros(3, 7), make().t())
