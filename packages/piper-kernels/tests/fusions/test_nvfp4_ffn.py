"""The NVFP4 networks against compositions of their unfused operators."""

import pytest
import torch
from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

from piper_kernels.fusions.convrot_nvfp4_gelu_ffn import _ops as convrot_gelu
from piper_kernels.fusions.convrot_nvfp4_swiglu_ffn import _ops as convrot_swiglu
from piper_kernels.fusions.nvfp4_gelu_ffn import _ops as gelu
from piper_kernels.fusions.nvfp4_swiglu_ffn import _ops as swiglu
from piper_kernels.linear.nvfp4 import reference
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

FEATURES, INNER, OUTPUTS = 48, 80, 21
GROUP = 16


def rand(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def make(rows, features, act, rotated, dtype=torch.bfloat16, seed=0):
    options = {
        "compute_per_tensor_scale": True,
        "is_swizzled_scales": True,
        "act_per_tensor_scale": act,
        "act_quant_kwargs": QuantizeTensorToNVFP4Kwargs(
            is_swizzled_scales=True, use_dynamic_per_tensor_scale=act is None
        ),
    }
    dense = (rand(rows, features, seed=seed) / features**0.5).to(dtype)
    if rotated:
        return ConvRotNVFP4Tensor.from_hp(dense, group_size=GROUP, **options)
    return PiperNVFP4Tensor.from_hp(dense, **options)


def network(scales, rotated, dtype=torch.bfloat16, outputs=OUTPUTS):
    weights = [
        make(INNER, FEATURES, scales[0], rotated[0], dtype, 1),
        make(INNER, FEATURES, scales[1], rotated[1], dtype, 2),
        make(outputs, INNER, scales[2], rotated[2], dtype, 3),
    ]
    biases = [rand(INNER), None, rand(outputs, dtype=torch.float16, seed=6)]
    return weights, biases


def operands(weight, bias, convrot):
    group = (getattr(weight, "group_size", 0),) if convrot else ()
    return (
        weight.qdata,
        weight.scale,
        weight.per_tensor_scale,
        weight.act_per_tensor_scale,
        bias,
        weight.act_per_tensor_scale is None,
        *group,
        weight.high_first,
    )


def arguments(x, weights, biases, chunk_rows, convrot):
    pairs = zip(weights, biases, strict=True)
    return (x, *(item for pair in pairs for item in operands(*pair, convrot)), chunk_rows)


def project(x, weight, bias):
    return reference.linear(
        x,
        weight.qdata,
        weight.scale,
        weight.per_tensor_scale,
        weight.act_per_tensor_scale,
        bias,
        weight.act_per_tensor_scale is None,
        group_size=getattr(weight, "group_size", 0),
    )


def composition(x, weights, biases, activation, chunk_rows):
    """Sources see the whole input, ``down`` sees one chunk at a time."""
    hidden = project(x, weights[1], biases[1])
    if activation == "swiglu":
        hidden = torch.cat((hidden, project(x, weights[0], biases[0])), -1)
    down = weights[2]
    parts = []
    for part in hidden.split(chunk_rows):
        prepared = reference.prepare_input(
            part,
            down.act_per_tensor_scale,
            down.act_per_tensor_scale is None,
            "swiglu" if activation == "swiglu" else "gelu_tanh",
            group_size=getattr(down, "group_size", 0),
        )
        parts.append(
            reference.linear_prepared(
                *prepared, down.qdata, down.scale, down.per_tensor_scale, biases[2], x.dtype
            )
        )
    return torch.cat(parts)


OPERATORS = {
    ("swiglu", False): swiglu.swiglu_ffn,
    ("swiglu", True): convrot_swiglu.swiglu_ffn,
    ("gelu", False): gelu.gelu_ffn,
    ("gelu", True): convrot_gelu.gelu_ffn,
}
SCALES = {
    "dynamic": (None, None, None),
    "shared": (torch.tensor(0.002),) * 2 + (torch.tensor(0.001),),
    "mixed": (torch.tensor(0.002), None, torch.tensor(0.001)),
}
ROTATIONS = {
    "plain": (False, (False,) * 3),
    "rotated": (True, (True,) * 3),
    "rotated down": (True, (False, False, True)),
}


def select(items, activation):
    return items if activation == "swiglu" else items[1:]


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("rows", [1, 33, 127, 129, 300])
def test_equals_the_composition(activation, rotation, scales, rows):
    convrot, rotated = ROTATIONS[rotation]
    weights, biases = network(SCALES[scales], rotated)
    x = rand(rows, FEATURES, dtype=torch.bfloat16)
    chosen = select(weights, activation), select(biases, activation)
    operator = OPERATORS[activation, convrot]
    for chunk_rows in (128, 1536):
        actual = operator(*arguments(x, *chosen, chunk_rows, convrot))
        expected = composition(x, weights, biases, activation, chunk_rows)
        assert actual.dtype == x.dtype
        # Chunks of a matrix product may be summed in another order, then rounded once.
        torch.testing.assert_close(actual.float(), expected.float(), rtol=2**-6, atol=2e-2)
        assert (actual.float() - expected.float()).norm() < 3e-3 * expected.float().norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("key", OPERATORS, ids=str)
def test_error_of_the_format(key, dtype):
    activation, convrot = key
    weights, biases = network((None,) * 3, (convrot,) * 3, dtype)
    x = rand(2, 65, FEATURES, dtype=dtype)
    dense = [w.dequantize(torch.float32).double() for w in weights]
    hidden = x.double() @ dense[1].t()
    if activation == "swiglu":
        gate = x.double() @ dense[0].t() + biases[0].double()
        hidden = hidden * gate * torch.sigmoid(gate)
    else:
        hidden = torch.nn.functional.gelu(hidden, approximate="tanh")
    expected = hidden @ dense[2].t() + biases[2].double()
    chosen = select(weights, activation), select(biases, activation)
    actual = OPERATORS[key](*arguments(x, *chosen, 128, convrot))
    assert actual.shape == (2, 65, OUTPUTS)
    # Two quantized inputs of four bits each: about 9 % each.
    assert (actual.double() - expected).norm() < 0.2 * expected.norm()


@pytest.mark.parametrize("key", OPERATORS, ids=str)
@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (0,)])
def test_opcheck(key, lead):
    activation, convrot = key
    weights, biases = network(SCALES["mixed"], (convrot,) * 3)
    chosen = select(weights, activation), select(biases, activation)
    x = rand(*lead, FEATURES, dtype=torch.bfloat16)
    operands = arguments(x, *chosen, 128, convrot)
    before = [item.clone() for item in operands if isinstance(item, torch.Tensor)]
    # The schema check compares inputs in arithmetic that float8 lacks on the CPU.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPERATORS[key], operands, test_utils=checks)
    after = [item for item in operands if isinstance(item, torch.Tensor)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.reshape(-1).view(torch.uint8), new.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("key", OPERATORS, ids=str)
def test_zero_inputs_give_the_bias(key):
    activation, convrot = key
    weights, biases = network((None,) * 3, (convrot,) * 3)
    biases[0] = None
    chosen = select(weights, activation), select(biases, activation)
    x = torch.zeros(300, FEATURES, dtype=torch.bfloat16)
    actual = OPERATORS[key](*arguments(x, *chosen, 128, convrot))
    assert torch.equal(actual, biases[2].to(torch.bfloat16).expand(300, OUTPUTS))


@pytest.mark.parametrize("key", OPERATORS, ids=str)
def test_gated_updates(key):
    activation, convrot = key
    gated = {
        ("swiglu", False): swiglu.swiglu_ffn_gated_updates_,
        ("swiglu", True): convrot_swiglu.swiglu_ffn_gated_updates_,
        ("gelu", False): gelu.gelu_ffn_gated_updates_,
        ("gelu", True): convrot_gelu.gelu_ffn_gated_updates_,
    }[key]
    weights, biases = network((None,) * 3, (convrot,) * 3, outputs=200)
    chosen = select(weights, activation), select(biases, activation)
    x = rand(300, FEATURES, dtype=torch.bfloat16)
    *front, chunk_rows = arguments(x, *chosen, 128, convrot)
    ffn = OPERATORS[key](*front, chunk_rows).double()
    base, update = (rand(300, 200, dtype=torch.bfloat16, seed=s) for s in (1, 2))
    gates = [rand(4, 200, dtype=torch.bfloat16, seed=s) for s in (3, 4)]
    index = torch.arange(300) % 4
    expected = base.double() + gates[0].double()[index] * update.double()
    expected += gates[1].double()[index] * ffn
    assert gated(*front, base, update, *gates, index, False, chunk_rows) is None
    torch.testing.assert_close(update.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(("rows", "error"), [(64, ValueError), (0, ValueError), (1.5, Exception)])
def test_chunk_rows_cover_whole_tiles(rows, error):
    weights, biases = network((None,) * 3, (False,) * 3)
    x = rand(5, FEATURES, dtype=torch.bfloat16)
    with pytest.raises(error):
        swiglu.swiglu_ffn(*arguments(x, weights, biases, rows, False))
