"""The ConvRot INT8 networks against their unfused operators, bit for bit."""

import pytest
import torch
from torch.nn import functional

from piper_kernels.fusions._ffn import convrot_int8 as core
from piper_kernels.fusions._ffn.operands import validate_input
from piper_kernels.fusions.convrot_int8_gelu_ffn import _ops as gelu_ops
from piper_kernels.fusions.convrot_int8_swiglu_ffn import _ops as swiglu_ops
from piper_kernels.linear.convrot import convrot_int8_linear
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

ROWS = (0, 1, 7, 31, 33, 127, 129, 1000)
FEATURES, INNER, OUTPUTS = 48, 80, 21


def rand(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def make(rows, features, act=None, dtype=torch.bfloat16, seed=0):
    dense = (rand(rows, features, seed=seed) / features**0.5).to(dtype)
    return ConvRotInt8Tensor.from_hp(dense, group_size=16, act_per_tensor_scale=act)


def network(scales=(None, None, None), dtype=torch.bfloat16, outputs=OUTPUTS):
    """Gate, value and down with biases of three dtypes, one of them strided."""
    weights = [
        make(INNER, FEATURES, scales[0], dtype, 1),
        make(INNER, FEATURES, scales[1], dtype, 2),
        make(outputs, INNER, scales[2], dtype, 3),
    ]
    biases = [
        rand(2 * INNER, dtype=torch.float32)[::2],
        rand(INNER, dtype=torch.float16, seed=5),
        rand(outputs, dtype=torch.bfloat16, seed=6),
    ]
    return weights, biases


def flat(weight, bias):
    return weight.qdata, weight.scale, bias, weight.group_size


def swiglu_args(x, weights, biases, chunk_rows):
    operands = [item for pair in zip(weights, biases, strict=True) for item in flat(*pair)]
    return (x, *operands, chunk_rows, *(w.act_per_tensor_scale for w in weights))


def gelu_args(x, weights, biases, chunk_rows):
    return swiglu_args(x, weights[1:], biases[1:], chunk_rows)


def unfused_swiglu(x, weights, biases):
    gate, value, down = weights
    packed = torch.cat(
        (functional.linear(x, value, biases[1]), functional.linear(x, gate, biases[0])), -1
    )
    return convrot_int8_linear(packed, down, biases[2], activation_fn="swiglu")


def unfused_gelu(x, weights, biases):
    hidden = functional.linear(x, weights[1], biases[1])
    return convrot_int8_linear(hidden, weights[2], biases[2], activation_fn="gelu_tanh")


CASES = {
    "swiglu": (swiglu_ops.swiglu_ffn, swiglu_args, unfused_swiglu),
    "gelu": (gelu_ops.gelu_ffn, gelu_args, unfused_gelu),
}
SCALES = {
    "dynamic": (None, None, None),
    "shared": (torch.tensor(0.03),) * 2 + (torch.tensor(0.01),),
    "independent": tuple(torch.tensor(s) for s in (0.03, 0.05, 0.01)),
    "mixed": (torch.tensor(0.03), None, torch.tensor(0.01)),
}


@pytest.mark.parametrize("activation", CASES)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("rows", ROWS)
def test_equals_the_unfused_operators(activation, scales, rows):
    operator, arguments, unfused = CASES[activation]
    weights, biases = network(SCALES[scales])
    x = rand(rows, FEATURES, dtype=torch.bfloat16)
    expected = unfused(x, weights, biases)
    for chunk_rows in (32, 4096):
        actual = operator(*arguments(x, weights, biases, chunk_rows))
        assert actual.dtype == x.dtype
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("activation", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_independent_float64_network(activation, dtype):
    operator, arguments, _ = CASES[activation]
    weights, biases = network(dtype=dtype)
    x = rand(2, 33, FEATURES, dtype=dtype)
    dense = [weight.dequantize(torch.float32).double() for weight in weights]
    wide = [bias.double() for bias in biases]
    value = functional.linear(x.double(), dense[1], wide[1])
    if activation == "swiglu":
        gate = functional.linear(x.double(), dense[0], wide[0])
        hidden = value * gate / (1 + torch.exp(-gate))
    else:
        hidden = functional.gelu(value, approximate="tanh")
    expected = functional.linear(hidden, dense[2], wide[2])
    actual = operator(*arguments(x, weights, biases, 32))
    assert actual.shape == (2, 33, OUTPUTS)
    assert (actual.double() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("activation", CASES)
def test_strided_zero_and_huge_rows(activation, graph_capture):
    operator, arguments, unfused = CASES[activation]
    weights, biases = network()
    x = rand(FEATURES, 40, dtype=torch.bfloat16).t()
    x[3], x[4] = 0, 1e4
    actual = operator(*arguments(x, weights, biases, 16))
    assert torch.equal(actual, unfused(x, weights, biases))
    assert actual.isfinite().all()


@pytest.mark.parametrize("activation", CASES)
@pytest.mark.parametrize("lead", [(5,), (2, 3), (0,), ()])
def test_opcheck(activation, lead):
    operator, arguments, _ = CASES[activation]
    weights, biases = network(SCALES["mixed"])
    x = rand(*lead, FEATURES, dtype=torch.bfloat16)
    torch.library.opcheck(operator, arguments(x, weights, biases, 32))


def test_sharing_is_decided_by_the_place_of_the_scale_at_execution(monkeypatch):
    calls = []
    backend = core.select_linear_backend(torch.device("cpu"))

    class Recorder:
        def prepare_input(self, source, *args, out):
            calls.append(("prepare", source.shape[-1], args[1]))
            return backend.prepare_input(source, *args, out=out)

        def linear_prepared(self, *args, out, second_projection):
            calls.append(("paired" if second_projection is not None else "single", out.shape[-1]))
            return backend.linear_prepared(*args, out=out, second_projection=second_projection)

    monkeypatch.setattr(core, "select_linear_backend", lambda device: Recorder())
    finish = [("prepare", 2 * INNER, "swiglu"), ("single", OUTPUTS)]
    x = rand(8, FEATURES, dtype=torch.bfloat16)
    scale = torch.tensor(0.03)
    for scales in ((None, None), (scale, scale), (scale, scale.view(()))):
        weights, biases = network((*scales, None))
        swiglu_ops.swiglu_ffn(*swiglu_args(x, weights, biases, 32))
        assert calls == [("prepare", FEATURES, None), ("paired", 2 * INNER), *finish]
        calls.clear()
    for scales in ((scale, scale.clone()), (None, scale)):
        weights, biases = network((*scales, None))
        swiglu_ops.swiglu_ffn(*swiglu_args(x, weights, biases, 32))
        assert calls == [("prepare", FEATURES, None), ("single", INNER)] * 2 + finish
        calls.clear()


@pytest.mark.parametrize("activation", CASES)
def test_workspaces_do_not_grow_with_the_rows(activation, monkeypatch):
    """What the network allocates itself, beside its result, is what its chunks need."""
    operator, arguments, _ = CASES[activation]
    seen = []

    class Recorder:
        def prepare_input(self, source, *args, out):
            seen.extend([source, *out])
            return out

        def linear_prepared(self, *args, out, second_projection):
            seen.append(out)
            return out

    monkeypatch.setattr(core, "select_linear_backend", lambda device: Recorder())
    weights, biases = network()
    x = rand(1000, FEATURES, dtype=torch.bfloat16)
    result = operator(*arguments(x, weights, biases, 64))
    own = {x.untyped_storage().data_ptr(), result.untyped_storage().data_ptr()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in seen}
    used = sum(size for place, size in storages.items() if place not in own)
    sources = 2 if activation == "swiglu" else 1
    assert used == 64 * (sources * INNER * 2 + max(FEATURES, INNER) + 4)


def bad(index, value):
    def change(arguments):
        changed = list(arguments)
        changed[index] = value(changed[index]) if callable(value) else value
        return changed

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (bad(13, 0), ValueError, "positive integer, got 0"),
        (bad(13, -4), ValueError, "positive integer"),
        (bad(0, lambda x: x[..., :-1]), ValueError, "input features"),
        (bad(0, lambda x: x.double()), ValueError, "float16, bfloat16 or float32"),
        (bad(0, lambda x: x.sum()), ValueError, "feature dimension"),
        (bad(4, 64), ValueError, "not divisible by group size"),
        (bad(1, lambda q: q[:-1]), ValueError, "scale"),
        (bad(3, lambda b: b[:-1]), ValueError, "bias must have shape"),
        (bad(3, lambda b: b.double()), ValueError, "must be FP16, BF16, or FP32"),
        (bad(14, torch.ones(2)), ValueError, "FP32 scalar"),
        (bad(9, lambda q: q.t().contiguous().t()), ValueError, "must be contiguous"),
    ],
)
def test_errors_of_operands(change, error, message):
    weights, biases = network()
    arguments = swiglu_args(rand(5, FEATURES, dtype=torch.bfloat16), weights, biases, 32)
    with pytest.raises(error, match=message):
        swiglu_ops.swiglu_ffn(*change(arguments))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [
            mode.from_tensor(item) if isinstance(item, torch.Tensor) else item
            for item in change(arguments)
        ]
        with pytest.raises(error, match=message):
            swiglu_ops.swiglu_ffn(*fake)


def test_activations_have_a_number_of_projections():
    with pytest.raises(ValueError, match="swiglu takes 2 projections, got 1"):
        validate_input(rand(5, FEATURES), 1, "swiglu")


def test_gate_and_value_must_agree():
    weights, biases = network()
    weights[0] = make(INNER - 1, FEATURES)
    biases[0] = None
    with pytest.raises(ValueError, match="gate and value must share"):
        swiglu_ops.swiglu_ffn(*swiglu_args(rand(5, FEATURES), weights, biases, 32))
