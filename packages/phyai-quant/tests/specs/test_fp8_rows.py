"""FP8 rows quantized at load: codes, legs, who asks for them and what is refused."""

import pytest
import torch

from phyai_quant import QuantConfigError, QuantScheme, TensorQuant, materialize
from phyai_quant.policy_section import parse_quantization_section
from phyai_quant.specs.base import AllocationRequest
from phyai_quant.specs.fp8_rows import Fp8RowsSpec
from phyai_quant.specs.humming import HummingSpec

WEIGHT = TensorQuant("fp8_e4m3", "per_channel")
INPUT = TensorQuant("fp8_e4m3", "per_channel", dynamic=True)
SCHEME = QuantScheme(WEIGHT, INPUT, online=True, stored_by="fp8_rows")
SECTION = {
    "default": {
        "weight": {"dtype": "fp8_e4m3"},
        "input": {"dtype": "fp8_e4m3"},
        "stored_by": "fp8_rows",
    }
}


def test_a_policy_asks_for_it_by_name():
    plan = parse_quantization_section(SECTION)
    assert plan.resolve("any.layer") == SCHEME
    assert isinstance(materialize(SCHEME, 90), Fp8RowsSpec)
    unnamed = {"default": {**SECTION["default"], "stored_by": None}}
    spec = materialize(parse_quantization_section(unnamed).resolve("any.layer"))
    assert isinstance(spec, HummingSpec)
    with pytest.raises(QuantConfigError, match=r"default\.stored_by: 3 is not the name"):
        parse_quantization_section({"default": {**SECTION["default"], "stored_by": 3}})
    rules = [{"match": {"name": "a"}, "scheme": None, "stored_by": "fp8_rows"}]
    with pytest.raises(QuantConfigError, match="cannot be combined with 'scheme: null'"):
        parse_quantization_section({"rules": rules})


@pytest.mark.parametrize(
    "scheme",
    [
        QuantScheme(WEIGHT, online=True, stored_by="fp8_rows"),
        QuantScheme(WEIGHT, INPUT, stored_by="fp8_rows"),
        QuantScheme(TensorQuant("int8", "per_channel"), INPUT, True, "fp8_rows"),
    ],
)
def test_other_schemes_are_refused(scheme):
    with pytest.raises(QuantConfigError, match=r"fp8_rows does not store .*; allowed: weight fp8"):
        materialize(scheme, 90)


def test_rows_are_rounded_to_nearest_by_their_largest_value(make_layer):
    torch.manual_seed(0)
    source = torch.randn(19, 48)
    source[3], source[4, 0] = 0, 1e4
    layer, spec = make_layer("a.qkv_proj"), materialize(SCHEME)
    spec.allocate(layer, AllocationRequest((19, 48), torch.bfloat16, (8, 4, 7), ("q", "k", "v")))
    assert spec.missing_parts(layer)
    for leg, part in zip("vqk", (source[12:], source[:8], source[8:12]), strict=True):
        spec.load_weight(layer, "weight", part, leg)
    spec.process_after_loading(layer)
    scale = source.abs().amax(1).clamp_min(1e-30) / 448
    torch.testing.assert_close(layer.weight_scale, scale)
    expected = (source / layer.weight_scale[:, None]).to(torch.float8_e4m3fn)
    differing = (layer.weight.float() != expected.float()).double().mean()
    assert layer.weight.dtype == torch.float8_e4m3fn
    assert differing < 0.01  # ties only
    error = (spec.dequantize_weight(layer) - source).norm() / source.norm()
    assert error < 0.03
    assert spec.missing_parts(layer) == []


def test_bad_sources_are_named(make_layer):
    layer, spec = make_layer(), materialize(SCHEME)
    spec.allocate(layer, AllocationRequest((4, 16), torch.bfloat16))
    with pytest.raises(QuantConfigError, match="cannot use checkpoint tensor 'weight_scale'"):
        spec.load_weight(layer, "weight_scale", torch.ones(4))
    with pytest.raises(QuantConfigError, match="NaN or infinite"):
        spec.load_weight(layer, "weight", torch.full((4, 16), torch.nan))
    with pytest.raises(QuantConfigError, match="float8"):
        spec.load_weight(layer, "weight", torch.zeros(4, 16).to(torch.float8_e4m3fn))
    with pytest.raises(QuantConfigError, match="never loaded"):
        spec.process_after_loading(layer)
