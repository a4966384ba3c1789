from dataclasses import replace

import pytest
from torch import nn

from phyai_quant import Matcher, QuantConfigError, QuantPlan, QuantScheme, Rule, TensorQuant
from phyai_quant.disk_checks import (
    check_quantized_layers,
    check_resolved_layers,
    check_unquantized_dtypes,
)
from phyai_quant.plan import Resolution

FP8 = QuantScheme(TensorQuant("fp8_e4m3", "per_channel"))
ROTATED = QuantScheme(
    TensorQuant("int8", "per_channel", rotation_group=64),
    TensorQuant("int8", "per_channel", dynamic=True),
    online=True,
)


def plan(pattern, scheme, default=None):
    return QuantPlan((Rule(Matcher("name", pattern), scheme, "c.json: x"),), default, source="c")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("a.b.qweight", "I32"),
        ("a.b.g_idx", "I32"),
        ("a.b.weight.qdata", "I8"),
        ("a.b.pre_quant_scale", "BF16"),
        ("a.b.SCB", "F32"),
    ],
)
@pytest.mark.parametrize("known", [None, QuantPlan(default=FP8)])
def test_tensors_of_other_formats_are_refused(name, dtype, known):
    with pytest.raises(QuantConfigError) as error:
        check_unquantized_dtypes({name: dtype}, known)
    last = name.rpartition(".")[2]
    assert f"{name} ({dtype}): no weight format here reads {last!r}" in str(error.value)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F4", "torch.float8_e4m3fn"])
@pytest.mark.parametrize("name", ["mlp.experts.gate_up_proj", "mlp.experts.w1.data", "weight", "x"])
def test_small_floats_under_any_name_need_a_config(name, dtype):
    with pytest.raises(QuantConfigError, match="the checkpoint declares no quantization"):
        check_unquantized_dtypes({name: dtype}, None)


def test_small_floats_of_planned_layers_pass():
    names = {"a.b": "F8_E4M3", "a.b.blocks": "F8_E4M3", "a.b.weight_scale": "F8_E4M3"}
    check_unquantized_dtypes(names, plan("a.b", FP8))
    with pytest.raises(QuantConfigError, match=r"a\.c"):
        check_unquantized_dtypes({"a.c.blocks": "F8_E4M3"}, plan("a.b", FP8))
    with pytest.raises(QuantConfigError, match="belongs to no layer"):
        check_unquantized_dtypes({"weight": "I8"}, QuantPlan(default=FP8))


@pytest.mark.parametrize(
    "tensor", ["weight_zero_point", "weight_g_idx", "input_zero_point", "comfy_quant"]
)
def test_every_companion_of_codes_counts(tensor):
    with pytest.raises(QuantConfigError, match=f"a.b.{tensor}"):
        check_unquantized_dtypes({f"a.b.{tensor}": "I32"}, plan("a.b", None, FP8))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "torch.bfloat16"])
def test_unquantized_weights_of_covered_layers_are_refused(dtype):
    layers = {"a.experts.0.up": "Linear", "a.experts.1.up": nn.Linear, "a.gate": "Linear"}
    names = {f"{name}.weight": dtype for name in layers} | {"a.experts.0.up.weight": "F8_E4M3"}
    with pytest.raises(QuantConfigError) as error:
        check_quantized_layers(names, plan("a.gate", None, FP8), layers)
    text = str(error.value)
    assert f"a.experts.1.up.weight ({dtype}): not quantized, but the default of c says" in text
    assert "a.experts.0" not in text
    assert "a.gate" not in text
    with pytest.raises(
        QuantConfigError, match=r"but name 'a\.gate' -> weight fp8.*\(c\.json: x\)$"
    ):
        check_quantized_layers(names, plan("a.gate", FP8), layers)
    with pytest.raises(QuantConfigError, match="the default of c says weight fp8_e4m3"):
        check_quantized_layers(names, plan("a.gate", None, FP8), layers)


def test_unquantized_weights_pass_where_nothing_else_is_expected():
    layers = {"a.b": "Linear", "a.missing": "Linear"}
    for scheme in (None, ROTATED):
        check_quantized_layers({"a.b.weight": "BF16"}, QuantPlan(default=scheme), layers)


def test_decisions_of_the_caller_count():
    rules = plan("a.qkv_proj", FP8)
    (first, *_) = rules.explain("a.qkv_proj").legs
    decided = {"b.to_q": Resolution("b.to_q", (first,)), "b.gate": rules.explain("b.gate")}
    with pytest.raises(QuantConfigError, match=r"b\.to_q\.weight \(F16\).*name 'a\.qkv_proj'"):
        check_resolved_layers({"b.to_q.weight": "F16", "b.gate.weight": "F16"}, rules, decided)
    check_resolved_layers({"b.to_q.weight": "F8_E4M3"}, rules, decided)


def test_formats_of_other_packages_say_themselves_what_they_read():
    stored = replace(FP8, stored_by="llm-int8")
    check_quantized_layers({"a.b.weight": "F16"}, plan("a.b", stored), {"a.b": "Linear"})
