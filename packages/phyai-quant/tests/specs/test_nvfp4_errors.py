"""What an nvfp4 weight refuses: parts that are missing, given twice or of another kind."""

import pytest
import torch

from phyai_quant import QuantConfigError, TensorQuant
from phyai_quant.specs.nvfp4 import Nvfp4Spec

E4M3 = torch.float8_e4m3fn


def nvfp4(**fields):
    return TensorQuant("nvfp4", "block", micro_scaled=True, block_shape=(1, 16), **fields)


WEIGHT = nvfp4()
DYNAMIC = nvfp4(dynamic=True)


def packed(rows, columns):
    return torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)


def block_scales(rows, columns):
    return (torch.rand(rows, columns // 16) * 30 + 0.1).to(E4M3)


def test_some_legs_without_an_input_scale_are_an_error(allocated):
    spec = Nvfp4Spec(WEIGHT, DYNAMIC)
    layer = allocated(spec, (4, 32), (2, 2), ("gate", "up"), "a.gate_up_proj")
    for name, value in (("weight", packed(4, 32)), ("weight_scale", block_scales(4, 32))):
        spec.load_weight(layer, name, value)
    spec.load_weight(layer, "weight_scale_2", torch.tensor(1.0))
    spec.load_weight(layer, "input_scale", torch.tensor(1.0), "up")
    with pytest.raises(QuantConfigError, match="some legs but never for 'gate'"):
        spec.process_after_loading(layer)


def test_what_never_arrives_is_an_error(allocated):
    spec = Nvfp4Spec(WEIGHT)
    layer = allocated(spec, (4, 32), (2, 2), (0, 1), "a.gate_up_proj")
    spec.load_weight(layer, "weight_packed", packed(2, 32), 1)
    spec.load_weight(layer, "weight_scale", block_scales(2, 32), 0)
    spec.load_weight(layer, "weight_scale_2", torch.tensor(1.0), 0)
    missing = ["weight[0]", "weight_scale[1]", "weight_global_scale[1]"]
    assert spec.missing_parts(layer) == [f"a.gate_up_proj.{part}" for part in missing]
    with pytest.raises(QuantConfigError, match="never loaded: a"):
        spec.process_after_loading(layer)
    with pytest.raises(QuantConfigError, match="call process_after_loading before reading"):
        spec.dequantize_weight(layer)
    with pytest.raises(QuantConfigError, match="is weight-only and does not quantize"):
        spec.quantize_activation(torch.ones(1, 32), layer)


@pytest.mark.parametrize("name", ["weight", "weight_scale", "weight_scale_2"])
def test_tensors_given_twice_are_refused(allocated, name):
    spec = Nvfp4Spec(WEIGHT)
    layer = allocated(spec, (4, 32))
    values = {
        "weight": packed(4, 32),
        "weight_scale": block_scales(4, 32),
        "weight_scale_2": torch.tensor(1.0),
    }
    other = {"weight": "weight_packed", "weight_scale_2": "weight_global_scale"}.get(name, name)
    spec.load_weight(layer, name, values[name])
    with pytest.raises(QuantConfigError, match=f"is loaded twice, now as '{other}'"):
        spec.load_weight(layer, other, values[name])


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("weight", torch.zeros(4, 32), r"config says 4-bit codes .* 'weight' is torch\.float32"),
        (
            "weight",
            torch.zeros(4, 32, dtype=torch.uint8),
            r"\[4, 32\], the layer expects \[4, 16\]",
        ),
        ("weight_packed", torch.zeros(4, 16, dtype=torch.int32), r"is torch\.int32; allowed"),
        ("weight_scale", torch.ones(4, 2), r"is torch\.float32; allowed: torch\.float8_e4m3fn"),
        ("weight_scale", torch.ones(4, 1).to(E4M3), r"\[4, 1\], the layer expects \[4, 2\]"),
        ("weight_scale", torch.ones(128, 4).to(E4M3), r"\[128, 4\], the layer expects \[4, 2\]"),
        ("weight_scale_2", torch.ones(4), r"'weight_scale_2' has shape \[4\]"),
        ("weight_scale_2", torch.tensor(torch.inf), "is inf; allowed: a finite multiplier"),
        ("weight_scale_2", torch.tensor(-1.0), r"is -1\.0; allowed: a finite multiplier, 0 or"),
        ("weight_scale_2", torch.tensor(torch.nan), "is nan; allowed"),
        ("weight_scale_2", torch.tensor(1), r"is torch\.int64; allowed"),
        ("weight_global_scale", torch.tensor(0.0), r"is 0\.0; allowed: a reciprocal above 0"),
        ("weight_global_scale", torch.tensor(torch.nan), "is nan; allowed: a reciprocal above 0"),
        ("input_global_scale", torch.tensor(0.0), "a reciprocal above 0"),
        ("weight_shape", torch.ones(2), "cannot use checkpoint tensor 'weight_shape'"),
    ],
)
def test_bad_tensors_name_the_layer(allocated, name, value, text):
    spec = Nvfp4Spec(WEIGHT, DYNAMIC)
    layer = allocated(spec, (4, 32))
    with pytest.raises(QuantConfigError, match=rf"a\.down_proj: .*{text}"):
        spec.load_weight(layer, name, value)
    assert len(spec.missing_parts(layer)) == 3


@pytest.mark.parametrize("columns", [8, 15, 24])
def test_widths_that_blocks_do_not_cover(allocated, columns):
    with pytest.raises(
        QuantConfigError, match=f"a.fc: K = {columns} is not divisible by the block"
    ):
        allocated(Nvfp4Spec(WEIGHT), (4, columns), prefix="a.fc")


@pytest.mark.parametrize(
    ("weight", "act", "text"),
    [
        (TensorQuant("mxfp4", "block", block_shape=(1, 32)), None, r"allowed: nvfp4 with block"),
        (nvfp4(act_order=True), None, "allowed: symmetric, micro-scaled, stored scales"),
        (nvfp4(symmetric=False), None, "allowed: symmetric, micro-scaled, stored scales"),
        (TensorQuant("nvfp4", "block", block_shape=(1, 16)), None, "allowed: symmetric, micro-s"),
        (WEIGHT, TensorQuant("int8", "per_channel", dynamic=True), "allowed: symmetric fp8_e4m3"),
        (
            WEIGHT,
            TensorQuant("mxfp4", "block", dynamic=True, micro_scaled=True, block_shape=(1, 32)),
            "allowed: none, nvfp4, or fp8",
        ),
    ],
)
def test_other_schemes_are_refused(weight, act, text):
    with pytest.raises(QuantConfigError, match=text):
        Nvfp4Spec(weight, act)
