import math

import pytest
import torch

from piper_kernels._input_activations import apply_activation, width_factor

FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def gelu_tanh(x):
    return 0.5 * x * (1 + math.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_gelu_tanh_in_fp32(dtype):
    value = (torch.randn(3, 17) * 4).to(dtype)
    expected = [gelu_tanh(v) for v in value.double().flatten().tolist()]
    result = apply_activation(value, "gelu_tanh")
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.flatten(), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lead", [(), (0,), (3, 1)])
def test_swiglu_takes_up_then_gate(dtype, lead):
    up, gate = torch.randn(*lead, 5).to(dtype), torch.randn(*lead, 5).to(dtype)
    result = apply_activation(torch.cat([up, gate], -1), "swiglu")
    expected = up.double() * gate.double() / (1 + (-gate.double()).exp())
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)


def test_no_activation_converts_only():
    value = torch.randn(3)
    assert apply_activation(value, None) is value
    assert torch.equal(apply_activation(value.half(), None), value.half().float())


@pytest.mark.parametrize(("name", "factor"), [(None, 1), ("gelu_tanh", 1), ("swiglu", 2)])
def test_width_factor(name, factor):
    assert width_factor(name) == factor


@pytest.mark.parametrize("name", ["gelu", "SWIGLU", ""])
def test_unknown_activation(name):
    with pytest.raises(ValueError, match="activation_fn must be None, 'gelu_tanh', 'swiglu'"):
        apply_activation(torch.zeros(2), name)
    with pytest.raises(ValueError, match="activation_fn must be None"):
        width_factor(name)
