import re

import pytest
import torch
from torch.nn import functional

from phyai.checkpoints import CheckpointError, collect_slots, load_into
from phyai.layers import Leg, Linear
from phyai_quant import (
    Granularity,
    Matcher,
    QDType,
    QuantConfigError,
    QuantPlan,
    QuantScheme,
    Rule,
    TensorQuant,
    materialize,
    use_quant_plan,
)

LEGS = (Leg("q_proj", 16, "q"), Leg("k_proj", 5, "k"), Leg("v_proj", 3, "v"))
CONVROT = QuantScheme(
    TensorQuant(QDType.INT8, Granularity.PER_CHANNEL, rotation_group=16),
    TensorQuant(QDType.INT8, Granularity.PER_CHANNEL, dynamic=True),
    online=True,
)


def readers(tensors):
    return {name: lambda tensor=tensor: tensor for name, tensor in tensors.items()}


def parts(*, bias=True):
    tensors = {f"attn.{leg.name}.weight": torch.randn(leg.width, 32) for leg in LEGS}
    if bias:
        tensors |= {f"attn.{leg.name}.bias": torch.randn(leg.width) for leg in LEGS}
    return tensors


@pytest.mark.parametrize("shape", [(32,), (1, 32), (7, 32), (2, 3, 32), (0, 32)])
def test_fused_layer_equals_its_parts(shape):
    layer = Linear(32, LEGS, bias=True, prefix="attn.qkv_proj")
    tensors = parts()
    load_into(layer, readers(tensors), source="test")
    x = torch.randn(shape)
    expected = [
        functional.linear(
            x.double(),
            tensors[f"attn.{leg.name}.weight"].double(),
            tensors[f"attn.{leg.name}.bias"].double(),
        )
        for leg in LEGS
    ]
    torch.testing.assert_close(layer(x).double(), torch.cat(expected, -1), atol=1e-5, rtol=1e-5)


def test_a_format_that_cannot_hold_a_layer_is_refused_with_the_rule():
    rows = QuantScheme(TensorQuant(QDType.NVFP4, Granularity.PER_CHANNEL))
    for scheme, text in ((CONVROT, r"K = 24 is not divisible"), (rows, "no weight format stores")):
        rule = Rule(Matcher("name", "a.down_proj"), scheme, "policy.yaml: down")
        with use_quant_plan(QuantPlan((rule,))), pytest.raises(QuantConfigError) as error:
            Linear(24, 8, prefix="a.down_proj")
        assert re.match(rf"a\.down_proj: .*{text}", str(error.value))
        assert str(error.value).count("a.down_proj: ") == 1
        assert "decided by name 'a.down_proj' -> " in str(error.value)
        assert "(policy.yaml: down)" in str(error.value)
    with use_quant_plan(QuantPlan(default=CONVROT, source="policy.yaml")):
        with pytest.raises(QuantConfigError, match=r"; decided by the default of policy\.yaml$"):
            Linear(24, 8, prefix="a.down_proj")
        with pytest.raises(QuantConfigError, match="K = 24") as error:
            Linear(24, 8, scheme=CONVROT)
    assert "decided" not in str(error.value)


def test_a_misshapen_leg_is_named():
    layer = Linear(32, LEGS, prefix="attn.qkv_proj")
    tensors = parts(bias=False) | {"attn.k_proj.weight": torch.randn(4, 32)}
    with pytest.raises(CheckpointError, match=r"attn\.k_proj\.weight: .*\[4, 32\]"):
        load_into(layer, readers(tensors), source="test")


def test_a_strided_input_gives_the_same_rows():
    layer = Linear(32, 9, prefix="p")
    load_into(layer, readers({"p.weight": torch.randn(9, 32)}), source="test")
    x = torch.randn(4, 64)[:, ::2]
    torch.testing.assert_close(layer(x), layer(x.contiguous()))


def test_a_missing_leg_is_named():
    layer = Linear(32, LEGS, prefix="attn.qkv_proj")
    tensors = parts(bias=False)
    del tensors["attn.k_proj.weight"]
    with pytest.raises(CheckpointError, match=r"missing:\n    attn\.k_proj\.weight"):
        load_into(layer, readers(tensors), source="test")


def test_a_misshapen_bias_is_named():
    layer = Linear(32, 4, bias=True, prefix="p")
    tensors = {"p.weight": torch.zeros(4, 32), "p.bias": torch.zeros(5)}
    with pytest.raises(CheckpointError, match=r"p\.bias.*\(5,\).*needs \(4,\)") as caught:
        load_into(layer, readers(tensors), source="test")
    assert "missing" not in str(caught.value)  # it is wrong, and named once


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_a_bias_of_another_kind_is_named(dtype):
    layer = Linear(32, 4, bias=True, prefix="p")
    tensors = {"p.weight": torch.zeros(4, 32), "p.bias": torch.zeros(4, dtype=dtype)}
    with pytest.raises(CheckpointError, match=rf"p\.bias: .* has {dtype}.* is never quantized"):
        load_into(layer, readers(tensors), source="test")


def test_precedence_is_spec_then_scheme_then_plan_then_unquantized():
    plan = QuantPlan((Rule(Matcher("name", "p"), CONVROT),), None)
    with use_quant_plan(plan):
        assert Linear(32, 16, prefix="p").spec.spec_id.startswith("convrot_int8")
        assert Linear(32, 16, prefix="other").spec.spec_id == "bf16"
        assert Linear(32, 16).spec.spec_id == "bf16"
    assert Linear(32, 16, prefix="p").spec.spec_id == "bf16"
    assert Linear(32, 16, scheme=CONVROT).spec.spec_id.startswith("convrot_int8")
    dense = materialize(None)
    with use_quant_plan(plan):
        layer = Linear(32, 16, prefix="p", spec=dense, scheme=CONVROT)
    assert layer.spec is dense


def test_a_rule_for_the_legs_reaches_a_fused_layer_of_any_name():
    rules = tuple(Rule(Matcher("name", f"attn.{leg.name}"), CONVROT) for leg in LEGS)
    with use_quant_plan(QuantPlan(rules, None)):
        layer = Linear(32, LEGS, prefix="attn.packed_proj")
    assert layer.spec.spec_id.startswith("convrot_int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_layer_is_close_and_keeps_the_dtype(dtype):
    layer = Linear(32, LEGS, bias=True, prefix="attn.qkv_proj", scheme=CONVROT, params_dtype=dtype)
    tensors = parts()
    load_into(layer, readers(tensors), source="test")
    x = torch.randn(11, 32)
    weight = torch.cat([tensors[f"attn.{leg.name}.weight"] for leg in LEGS])
    bias = torch.cat([tensors[f"attn.{leg.name}.bias"] for leg in LEGS])
    found = layer(x.to(dtype))
    assert found.dtype == dtype
    expected = functional.linear(x, weight, bias)
    assert (found.float() - expected).norm() / expected.norm() < 0.02


def test_every_leg_has_its_own_slot_and_all_legs_one():
    layer = Linear(32, LEGS, bias=True, prefix="attn.qkv_proj")
    owners = (*(leg.name for leg in LEGS), "qkv_proj")
    names = {f"attn.{owner}.{kind}" for owner in owners for kind in ("weight", "bias")}
    assert set(collect_slots(layer)) == names


def test_one_tensor_of_all_legs_equals_the_legs():
    layers = [Linear(32, LEGS, bias=True, prefix="attn.qkv_proj") for _ in range(2)]
    tensors = parts()
    fused = {
        f"attn.qkv_proj.{kind}": torch.cat([tensors[f"attn.{leg.name}.{kind}"] for leg in LEGS])
        for kind in ("weight", "bias")
    }
    for layer, source in zip(layers, (tensors, fused), strict=True):
        load_into(layer, readers(source), source="test")
    x = torch.randn(3, 32)
    assert torch.equal(layers[0](x), layers[1](x))


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_leg_and_all_legs_in_one_checkpoint_are_refused(kind):
    layer = Linear(32, LEGS, bias=True, prefix="attn.qkv_proj")
    size = (24, 32) if kind == "weight" else (24,)
    tensors = parts() | {f"attn.qkv_proj.{kind}": torch.zeros(size)}
    message = rf"attn\.qkv_proj\.{kind}: the checkpoint also has attn\.q_proj\.{kind}.*not both"
    with pytest.raises(CheckpointError, match=message):
        load_into(layer, readers(tensors), source="test")


def test_a_missing_scale_is_named_as_the_checkpoint_would():
    scheme = QuantScheme(TensorQuant(QDType.INT8, Granularity.PER_CHANNEL))
    layer = Linear(32, LEGS, prefix="attn.qkv_proj", scheme=scheme)
    tensors = {f"attn.{leg.name}.weight": torch.zeros(leg.width, 32).char() for leg in LEGS}
    tensors |= {
        f"attn.{n}.weight_scale": torch.ones(w, 1) for n, w in (("q_proj", 16), ("v_proj", 3))
    }
    with pytest.raises(CheckpointError, match=r"1 missing:\n    attn\.k_proj\.weight_scale$"):
        load_into(layer, readers(tensors), source="test")


def test_a_missing_bias_is_named():
    layer = Linear(32, LEGS, bias=True, prefix="attn.qkv_proj")
    tensors = parts()
    del tensors["attn.v_proj.bias"]
    with pytest.raises(CheckpointError, match=r"1 missing:\n    attn\.v_proj\.bias$"):
        load_into(layer, readers(tensors), source="test")


STORED = ("blocks.0.to_q", "blocks.0.to_k", "blocks.0.to_v")


def test_a_checkpoint_may_spell_the_legs_otherwise():
    layer = Linear(32, LEGS, bias=True, prefix="attn.qkv_proj", stored=STORED)
    ours = Linear(32, LEGS, bias=True, prefix="attn.qkv_proj")
    tensors = parts()
    load_into(ours, readers(tensors), source="test")
    renamed = {
        key.replace(f"attn.{leg.name}", name): value
        for key, value in tensors.items()
        for leg, name in zip(LEGS, STORED, strict=True)
        if leg.name in key
    }
    load_into(layer, readers(renamed), source="test")
    assert torch.equal(layer.weight, ours.weight)
    assert torch.equal(layer.bias, ours.bias)


def test_errors_speak_of_the_names_in_the_file():
    layer = Linear(32, LEGS, prefix="attn.qkv_proj", stored=STORED)
    tensors = {f"{STORED[0]}.weight": torch.randn(16, 31), f"{STORED[2]}.weight": torch.ones(3, 32)}
    with pytest.raises(CheckpointError) as caught:
        load_into(layer, readers(tensors), source="test")
    assert "missing:\n    blocks.0.to_k.weight\n" in str(caught.value)
    assert "1 wrong:\n    blocks.0.to_q.weight: " in str(caught.value)
    one = Linear(4, 3, prefix="attn.to_out", stored=("blocks.0.o",), bias=True)
    assert one.missing_parts() == ["blocks.0.o.weight", "blocks.0.o.bias"]


@pytest.mark.parametrize("pattern", ["attn.q_proj", "attn.qkv_proj", STORED[0]])
def test_rules_match_either_spelling(pattern):
    rules = [Rule(Matcher("name", name), CONVROT) for name in (pattern, *STORED[1:])]
    with use_quant_plan(QuantPlan(rules, None)):
        layer = Linear(32, LEGS, prefix="attn.qkv_proj", stored=STORED)
    assert layer.spec.spec_id.startswith("convrot_int8")
