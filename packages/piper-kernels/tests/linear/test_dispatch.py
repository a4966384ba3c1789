import pytest
import torch

from piper_kernels.linear._dispatch import bind_linear_arguments


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((1, 2), {}, (1, 2, None)),
        ((1, 2, 3), {}, (1, 2, 3)),
        ((1,), {"weight": 2}, (1, 2, None)),
        ((), {"weight": 2, "input": 1, "bias": 3}, (1, 2, 3)),
    ],
)
def test_bind(args, kwargs, expected):
    assert bind_linear_arguments(args, kwargs) == expected


@pytest.mark.parametrize(
    ("args", "kwargs", "match"),
    [
        ((1, 2, 3, 4), {}, "at most 3 positional arguments but 4 were given"),
        ((1, 2), {"other": 3}, "unexpected keyword argument 'other'"),
        ((1, 2), {"input": 3}, "multiple values for argument 'input'"),
        ((), {"weight": 3}, "missing required argument: 'input'"),
        ((1,), {}, "missing required argument: 'weight'"),
    ],
)
def test_bind_errors(args, kwargs, match):
    with pytest.raises(TypeError, match=match):
        bind_linear_arguments(args, kwargs)


def test_linear_takes_keywords():
    from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

    weight = ConvRotInt8Tensor.from_hp(torch.randn(3, 16), group_size=16)
    x, bias = torch.randn(2, 16), torch.randn(3)
    linear = torch.nn.functional.linear
    assert torch.equal(linear(x, weight=weight, bias=bias), linear(x, weight, bias))
