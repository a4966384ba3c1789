"""Quantized inputs of integer weights against loops over Python numbers."""

import math

import pytest
import torch

from phyai_quant import Granularity, QuantConfigError, TensorQuant
from phyai_quant.specs.base import AllocationRequest
from phyai_quant.specs.fp8 import Fp8Spec
from phyai_quant.specs.int8 import Int8Spec

CHANNEL = TensorQuant("int8", "per_channel")
LOW, HIGH = -128, 127


def dynamic(granularity, dtype="int8", symmetric=True, group=None):
    return TensorQuant(
        dtype,
        granularity,
        symmetric=symmetric,
        dynamic=True,
        block_shape=None if group is None else (1, group),
    )


def loop_range(values, symmetric):
    """Scale and code of 0 of the values that share them."""
    top, bottom = max(0.0, *values), min(0.0, *values)
    if symmetric:
        return max(max(top, -bottom) / HIGH, 1e-30), 0
    scale = max((top - bottom) / (HIGH - LOW), 1e-30)
    return scale, min(max(round(LOW - bottom / scale), LOW), HIGH)


def batch(*shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)) + 0.5
    x.view(-1, shape[-1])[0] = 0
    x.view(-1, shape[-1])[-1] *= 1e5
    return x


def check(view, x, act, members):
    """``members`` gives the entry of the scale and the values that share it, for element (m, k)."""
    rows = x.reshape(-1, x.shape[-1]).float()
    assert view.x.shape == rows.shape
    assert view.x.dtype == torch.int8
    for m in range(rows.shape[0]):
        for k in range(rows.shape[1]):
            at, values = members(rows, m, k)
            scale, zero = loop_range(values.tolist(), act.symmetric)
            assert view.x_scale[at].item() == pytest.approx(scale, rel=1e-6)
            held = 0 if view.x_zero_point is None else int(view.x_zero_point[at])
            assert held == zero
            exact = float(rows[m, k]) / float(view.x_scale[at]) + held
            assert LOW <= int(view.x[m, k]) <= HIGH
            assert abs(min(max(exact, LOW), HIGH) - int(view.x[m, k])) <= 0.5 + 1e-4


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 7), (5, 31)], ids=str)
def test_token_scales(make_layer, shape, symmetric):
    act = dynamic("per_channel", symmetric=symmetric)
    x = batch(*shape)
    view = Int8Spec(CHANNEL, act).quantize_activation(x, make_layer())
    assert view.granularity is Granularity.PER_CHANNEL
    check(view, x, act, lambda rows, m, k: (m, rows[m]))


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("columns", [8, 9, 15])
def test_group_scales_of_strided_rows(make_layer, columns, symmetric):
    act = dynamic("block", symmetric=symmetric, group=4)
    x = batch(3, columns * 2)[:, ::2]
    view = Int8Spec(CHANNEL, act).quantize_activation(x, make_layer())
    assert view.x_scale.shape == (3, math.ceil(columns / 4))
    check(view, x, act, lambda rows, m, k: ((m, k // 4), rows[m, k // 4 * 4 : k // 4 * 4 + 4]))


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("rows", [1, 3])
def test_one_scale_for_the_tensor(make_layer, rows, symmetric):
    act = dynamic("per_tensor", symmetric=symmetric)
    x = batch(rows, 5).bfloat16()
    view = Int8Spec(CHANNEL, act).quantize_activation(x, make_layer())
    assert view.x_scale.shape == (1,)
    check(view, x, act, lambda rows, m, k: (0, rows.flatten()))


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel", "block"])
def test_empty_batches(make_layer, granularity, symmetric):
    act = dynamic(granularity, symmetric=symmetric, group=4 if granularity == "block" else None)
    spec = Int8Spec(CHANNEL, act)
    assert spec.quantize_activation(torch.empty(0, 8), make_layer()).x.shape == (0, 8)
    assert spec.fake_quantize_activation(torch.empty(2, 0, 8), make_layer()).shape == (2, 0, 8)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_ranges_that_overflow_fp32(make_layer, symmetric):
    x = torch.tensor([[3e38, -3e38, 0.0, 1e38], [1e-45, 0.0, 0.0, 0.0]])
    spec = Int8Spec(CHANNEL, dynamic("per_channel", symmetric=symmetric))
    restored = spec.fake_quantize_activation(x, make_layer())
    assert restored.isfinite().all()
    assert (restored[0] - x[0]).abs().max() < 3e38 / 100
    assert restored[0, 2] == 0
    assert (restored[1] == 0).all()


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_halves_round_to_even_and_ends_saturate(make_layer, symmetric):
    act = TensorQuant("int8", "per_tensor", symmetric=symmetric)
    spec = Int8Spec(CHANNEL, act)
    layer = loaded(spec, make_layer(), [(2.0, None if symmetric else 10)])
    x = torch.tensor([[1.0, 3.0, 5.0, -1.0, 1e6, -torch.inf]])
    view = spec.quantize_activation(x, layer)
    shift = 0 if symmetric else 10
    assert view.x[0, :4].tolist() == [shift, shift + 2, shift + 2, shift]
    assert view.x[0, 4:].tolist() == [127, -128]
    assert view.x_scale.tolist() == [2.0]
    expected = (view.x.float() - shift) * 2.0
    assert torch.equal(spec.fake_quantize_activation(x, layer), expected)


def loaded(spec, layer, inputs):
    """Loads legs of one row with static ``(scale, zero point)`` each, and finishes the layer."""
    count = len(inputs)
    spec.allocate(
        layer,
        AllocationRequest((count, 4), torch.float32, (1,) * count, tuple(range(count))),
    )
    spec.load_weight(layer, "weight", torch.ones(count, 4, dtype=torch.int8))
    spec.load_weight(layer, "weight_scale", torch.ones(count))
    for leg, (scale, zero) in enumerate(inputs):
        spec.load_weight(layer, "input_scale", torch.tensor([scale]), leg)
        if zero is not None:
            zero_point = torch.tensor([zero], dtype=torch.int8)
            spec.load_weight(layer, "input_zero_point", zero_point, leg)
    spec.process_after_loading(layer)
    return layer


def test_legs_take_the_largest_symmetric_scale(make_layer):
    spec = Int8Spec(CHANNEL, TensorQuant("int8", "per_tensor"))
    layer = loaded(spec, make_layer(), [(0.5, None), (2.0, 0), (1.0, None)])
    assert layer.input_scale.tolist() == [2.0]


def test_legs_that_agree_keep_their_zero_point(make_layer):
    spec = Int8Spec(CHANNEL, TensorQuant("int8", "per_tensor", symmetric=False))
    layer = loaded(spec, make_layer(), [(0.3, -128), (0.3, -128)])
    assert layer.input_scale.tolist() == pytest.approx([0.3])
    assert layer.input_zero_point.tolist() == [-128]


def test_legs_that_differ_are_covered(make_layer):
    """[0, 255] and [-51, 0] together span 306: a scale of 1.2."""
    spec = Int8Spec(CHANNEL, TensorQuant("int8", "per_tensor", symmetric=False))
    layer = loaded(spec, make_layer(), [(1.0, -128), (0.2, 127)])
    assert layer.input_scale.tolist() == pytest.approx([1.2])
    assert layer.input_zero_point.tolist() == [round(-128 + 51 / 1.2)]
    x = torch.tensor([[255.0, -51.0, 0.0, 0.6]])
    restored = spec.fake_quantize_activation(x, layer)
    assert (restored - x).abs().max() <= 0.7
    assert restored[0, 2] == 0


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
def test_fp8_inputs_are_those_of_fp8_weights(make_layer, granularity):
    act = dynamic(granularity, "fp8_e4m3")
    x = batch(3, 7)
    view = Int8Spec(CHANNEL, act).quantize_activation(x, make_layer())
    weight = TensorQuant("fp8_e4m3", "per_channel")
    expected = Fp8Spec(weight, act).quantize_activation(x, make_layer())
    assert view.x.dtype == torch.float8_e4m3fn
    assert torch.equal(view.x.float(), expected.x.float())
    assert torch.equal(view.x_scale, expected.x_scale)


def test_static_fp8_inputs(make_layer):
    spec = Int8Spec(CHANNEL, TensorQuant("fp8_e4m3", "per_tensor"))
    layer = loaded(spec, make_layer(), [(0.5, None), (0.25, None)])
    restored = spec.fake_quantize_activation(torch.tensor([[1.0, 1e6, -1e6, 0.0]]), layer)
    assert restored.tolist() == [[1.0, 224.0, -224.0, 0.0]]


def test_inputs_are_not_changed(make_layer):
    spec = Int8Spec(CHANNEL, dynamic("per_channel", symmetric=False))
    x = batch(2, 5)
    before = x.clone()
    spec.fake_quantize_activation(x, make_layer())
    assert torch.equal(x, before)


def test_weight_only_layers_do_not_quantize_inputs(make_layer):
    spec = Int8Spec(CHANNEL)
    for method in (spec.quantize_activation, spec.fake_quantize_activation):
        with pytest.raises(QuantConfigError, match=r"a: int8_per_channel_a16 is weight-only"):
            method(torch.zeros(1, 5), make_layer("a"))
