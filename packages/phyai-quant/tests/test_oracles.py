"""Checkpoints that the tools themselves wrote, read back as the tools read them.

``expected.safetensors`` of a fixture holds, for each quantized layer, every n-th row of the weight
that the tool dequantizes and the digest of all rows; scripts/build_quant_fixtures.py writes both.
"""

import hashlib
import json
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from phyai_quant import QuantConfigError, load_quant_plan, materialize
from phyai_quant.checkpoint import check_unquantized_dtypes
from phyai_quant.specs.base import AllocationRequest

FIXTURES = Path(__file__).parent / "fixtures"
CASES = sorted(str(p.parent.relative_to(FIXTURES)) for p in FIXTURES.glob("*/*/expected.*"))
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# legs that end inside a scale block cannot be fused
BLOCKED = ("llmcompressor/fp8_block", "modelopt/fp8_pb_wo")
# its scale is max|row| / 127.5 with codes from -128, ours max|row| / 127: one step apart at most
INT8_DYNAMIC = ("llmcompressor/w8a8",)
KV_SCALES = ("k_scale", "v_scale")


@dataclass(frozen=True)
class Fixture:
    layers: dict[str, dict[str, torch.Tensor]]
    expected: dict[str, torch.Tensor]
    shapes: dict[str, list[int]]
    digests: dict[str, str]
    row_step: int

    @property
    def quantized(self):
        return [name.removesuffix(".weight") for name in self.shapes]


@cache
def read(case):
    folder = FIXTURES / case
    layers = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, _, part = name.rpartition(".")
        layers.setdefault(layer, {})[part] = tensor
    with safe_open(folder / "expected.safetensors", "pt") as file:
        facts = json.loads(file.metadata()["facts"])
        expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return Fixture(layers, expected, facts["shapes"], facts["sha256"], facts["row_step"])


@cache
def plan_of(case):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*KV cache")
        return load_quant_plan(FIXTURES / case)


WITH_INPUTS = [case for case in CASES if any(key.endswith(".input") for key in read(case).expected)]


def load(case, names, prefix, without=None, sm=None):
    """Loads unfused layers as the legs of one layer."""
    fixture = read(case)
    widths = [fixture.shapes[f"{name}.weight"][0] for name in names]
    columns = fixture.shapes[f"{names[0]}.weight"][1]
    spec = materialize(plan_of(case).resolve(prefix, "Linear"), sm)
    layer = nn.Module()
    layer.prefix = prefix
    ids = (None,) if len(names) == 1 else tuple(name.rpartition(".")[2] for name in names)
    shape = (sum(widths), columns)
    request = AllocationRequest(shape, torch.bfloat16, tuple(widths), ids)
    spec.allocate(layer, request)
    for name, shard_id in zip(names, ids, strict=True):
        for part, tensor in fixture.layers[name].items():
            if part not in (*KV_SCALES, without):
                spec.load_weight(layer, part, tensor, shard_id)
    assert (spec.missing_parts(layer) == []) == (without is None)
    spec.process_after_loading(layer)
    return spec, layer


def assert_weight(case, name, weight):
    """Compares an fp32 weight with what the tool makes of the same tensors, in its dtype."""
    fixture, key = read(case), f"{name}.weight"
    assert list(weight.shape) == fixture.shapes[key]
    rows = fixture.expected[key]
    ours = weight.to(rows.dtype).float() + 0.0  # zeros of one sign
    torch.testing.assert_close(ours[:: fixture.row_step], rows.float(), rtol=0, atol=0)
    digest = hashlib.sha256(ours.contiguous().numpy().tobytes()).hexdigest()
    assert digest == fixture.digests[key]


@pytest.mark.parametrize("case", CASES)
def test_weights_equal_the_tools_own(case):
    assert len(read(case).quantized) >= 6
    for name in read(case).quantized:
        spec, layer = load(case, [name], name)
        assert_weight(case, name, spec.dequantize_weight(layer))


@pytest.mark.parametrize(
    "case", ["llmcompressor/nvfp4", "modelopt/nvfp4", "llmcompressor/mixed_precision"]
)
def test_scales_in_the_layout_of_blackwell_hold_the_same_weights(case):
    layouts = set()
    for prefix, names in [*((n, [n]) for n in read(case).quantized), *fused_layers(case)]:
        if plan_of(case).resolve(prefix, "Linear").weight.dtype != "nvfp4":
            continue
        spec, layer = load(case, names, prefix, sm=100)
        layouts.add(spec.physical_signature.layout)
        weight = spec.dequantize_weight(layer)
        for name, part in zip(names, weight.split(layer.logical_widths), strict=True):
            assert_weight(case, name, part)
    assert layouts == {"128x4"}


def fused_layers(case):
    """Yields every fused layer with its legs, when all legs are quantized."""
    quantized = read(case).quantized
    for name in quantized:
        parent, _, last = name.rpartition(".")
        for fused, legs in FUSED.items():
            names = [f"{parent}.{leg}" for leg in legs]
            if last == legs[0] and set(names) <= set(quantized):
                yield f"{parent}.{fused}", names


@pytest.mark.parametrize("case", [c for c in CASES if c not in BLOCKED])
def test_fused_layers_are_their_legs(case):
    assert list(fused_layers(case))
    for prefix, names in fused_layers(case):
        spec, layer = load(case, names, prefix)
        weight = spec.dequantize_weight(layer)
        for name, part in zip(names, weight.split(layer.logical_widths), strict=True):
            assert_weight(case, name, part)


def probe(columns, *, grid):
    """Returns the activation that the tools were given; see scripts/quant_fixtures_common.py."""
    steps = torch.arange(3 * columns).reshape(3, columns)
    x = (
        (steps * 37 % 101 - 50).float() / 16
        if grid
        else (steps * 7919 % 9973 - 4986).float() / 1600
    )
    x[1] = 0
    x[2] *= 256
    return x


@pytest.mark.parametrize("case", WITH_INPUTS)
def test_activations_are_rounded_as_the_tool_does(case):
    fixture = read(case)
    for key, theirs in fixture.expected.items():
        if not key.endswith(".input"):
            continue
        name = key.removesuffix(".input")
        spec, layer = load(case, [name], name)
        x = probe(theirs.shape[1], grid=spec.physical_signature.scale_dtype == "fp8_e8m0")
        ours = spec.fake_quantize_activation(x, layer).to(theirs.dtype)
        # products of two fp32 scales: theirs and ours may round them in another order
        tolerance = torch.full_like(x[:, :1], 2**-22) * theirs.float().abs()
        if case in INT8_DYNAMIC:
            tolerance = x.abs().amax(1, keepdim=True) / 127
        assert torch.all((ours.float() - theirs.float()).abs() <= tolerance)


def test_block_scales_that_a_leg_ends_inside_are_not_fused():
    case = BLOCKED[0]
    for prefix, names in fused_layers(case):
        with pytest.raises(QuantConfigError, match="which stand for 128 each"):
            load(case, names, prefix)


@pytest.mark.parametrize("case", CASES)
def test_plans_quantize_what_the_tool_quantized(case):
    fixture, plan = read(case), plan_of(case)
    dtypes = {
        f"{layer}.{part}": tensor.dtype
        for layer, tensors in fixture.layers.items()
        for part, tensor in tensors.items()
    }
    check_unquantized_dtypes(dtypes, plan)
    for layer, tensors in fixture.layers.items():
        if "weight_scale" in tensors:
            assert f"{layer}.weight" in fixture.shapes
            assert plan.resolve(layer, "Linear") is not None
        elif "weight" in tensors and tensors["weight"].dim() == 2 and "embed" not in layer:
            assert plan.resolve(layer, "Linear") is None


@pytest.mark.parametrize("case", CASES)
def test_without_its_config_a_checkpoint_is_refused(case):
    dtypes = {
        f"{layer}.{part}": tensor.dtype
        for layer, tensors in read(case).layers.items()
        for part, tensor in tensors.items()
    }
    with pytest.raises(QuantConfigError, match="declares no quantization"):
        check_unquantized_dtypes(dtypes, None)


@pytest.mark.parametrize(
    ("case", "algorithm"),
    [
        ("modelopt/int8_smoothquant", "W8A8_SQ_PER_CHANNEL"),
        ("modelopt/w4a16_awq", "W4A16_AWQ"),
        ("modelopt/w4a8_awq", "W4A8_AWQ"),
    ],
)
def test_scaled_inputs_are_refused_by_name(case, algorithm):
    with pytest.raises(QuantConfigError) as error:
        load_quant_plan(FIXTURES / case)
    assert str(FIXTURES / case / "hf_quant_config.json") in str(error.value)
    assert algorithm in str(error.value) or "pre_quant_scale" in str(error.value)


@pytest.mark.parametrize("case", ["llmcompressor/fp8", "modelopt/fp8_kv_cache"])
def test_a_quantized_kv_cache_is_kept_as_data_with_a_warning(case):
    with pytest.warns(UserWarning, match="quantized KV cache"):
        plan = load_quant_plan(FIXTURES / case)
    assert plan.kv_cache.dtype == "fp8_e4m3"


@pytest.mark.parametrize("case", CASES)
def test_a_layer_with_a_tensor_missing_is_refused(case):
    fixture = read(case)
    name = fixture.quantized[0]
    scheme = plan_of(case).resolve(name, "Linear")
    for part in fixture.layers[name]:
        # a dynamic NVFP4 input has a stored global scale or computes it
        optional = part.startswith("input_") and scheme.input.dynamic
        if optional or part in (*KV_SCALES, "weight_shape", "input_zero_point"):
            continue
        with pytest.raises(QuantConfigError, match=f"never loaded: {name}"):
            load(case, [name], name, without=part)


def test_fixtures_stay_small():
    assert sum(p.stat().st_size for p in FIXTURES.rglob("*") if p.is_file()) < 2 * 2**20
