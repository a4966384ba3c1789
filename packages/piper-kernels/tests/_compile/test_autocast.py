"""Autocast regions convert the input of every linear anew; passes see one input all the same."""

import pytest
import torch
from torch.nn import functional

from piper_kernels.fusions.convrot_int8_swiglu_ffn import convrot_int8_swiglu_ffn_compile_options
from piper_kernels.fusions.convrot_nvfp4_swiglu_ffn import convrot_nvfp4_swiglu_ffn_compile_options
from piper_kernels.linear.convrot import convrot_int8_compile_options
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor

INT8 = convrot_int8_compile_options()
PREPARE, PREPARED = "convrot_int8_prepare_input", "convrot_int8_linear_prepared"


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def make(rows, features=32):
    return ConvRotInt8Tensor.from_hp(rand(rows, features), group_size=16)


def make_nvfp4(rows, features=32):
    from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

    options = QuantizeTensorToNVFP4Kwargs(
        is_swizzled_scales=True, use_dynamic_per_tensor_scale=True
    )
    return ConvRotNVFP4Tensor.from_hp(
        rand(rows, features), group_size=16, is_swizzled_scales=True, act_quant_kwargs=options
    )


def two(x, a, b):
    return functional.linear(x, a), functional.linear(x, b, x.new_ones(b.shape[0]))


def swiglu(x, gate, value, down):
    hidden = functional.silu(functional.linear(x, gate)) * functional.linear(x, value)
    return functional.linear(hidden, down)


def run(graph_capture, function, *args, options=INT8):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, capture = graph_capture.run(function, *args, options=options)
        with torch.no_grad():
            expected = function(*args)
    return actual, expected, capture


def conversions(capture):
    targets = [str(node.target) for node in capture.graph_modules[-1].graph.nodes]
    return sum("convert_element_type" in name or "_to_copy" in name for name in targets)


def test_linears_of_a_converted_input_share_its_preparation(graph_capture):
    actual, expected, capture = run(graph_capture, two, rand(2, 5, 32), make(7), make(9))
    assert capture.targets == [PREPARE, PREPARED, PREPARED]
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("create", "helper", "name"),
    [
        (make, convrot_int8_swiglu_ffn_compile_options, "convrot_int8_swiglu_ffn"),
        (make_nvfp4, convrot_nvfp4_swiglu_ffn_compile_options, "convrot_nvfp4_swiglu_ffn"),
    ],
)
def test_networks_are_fused(graph_capture, create, helper, name):
    weights = (create(48), create(48), create(9, 48))
    actual, expected, capture = run(graph_capture, swiglu, rand(5, 32), *weights, options=helper())
    assert capture.targets == [name]
    assert actual.dtype == torch.bfloat16
    assert graph_capture.relative_error(actual, expected) < 0.05


def test_a_conversion_with_other_users_stays(graph_capture):
    """Results of a graph that share memory in eager mode and those that do not stay apart."""

    def block(x, a, b):
        first, second = x.bfloat16(), x.bfloat16()
        return functional.linear(first, a), functional.linear(second, b), first, second

    args = (rand(5, 32), make(7), make(9))
    (*_, first, second), (*_, expected, _), capture = run(graph_capture, block, *args)
    assert capture.targets == ["convrot_int8_linear"] * 2
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert torch.equal(second, expected)


def test_other_dtypes_are_other_conversions(graph_capture):
    def block(x, a, b):
        with torch.autocast("cpu", dtype=torch.float16):
            first = functional.linear(x, a)
        return first, functional.linear(x, b)

    actual, expected, capture = run(graph_capture, block, rand(5, 32), make(7), make(9))
    assert capture.targets == ["convrot_int8_linear"] * 2
    assert conversions(capture) == 2
    assert [x.dtype for x in actual] == [torch.float16, torch.bfloat16]
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
