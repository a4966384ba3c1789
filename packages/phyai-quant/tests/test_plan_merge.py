import warnings

import pytest

from phyai_quant import Matcher, QuantConfigError, QuantPlan, QuantScheme, Rule, TensorQuant
from phyai_quant.plan import warn_unmatched

FP8 = QuantScheme(TensorQuant("fp8_e4m3", "per_channel"))
INT8 = QuantScheme(TensorQuant("int8", "per_channel"))
ONLINE = QuantScheme(TensorQuant("int4", "block", block_shape=(1, 128)), online=True)
KV = TensorQuant("fp8_e4m3", "per_tensor")


def rule(name, scheme, source=""):
    return Rule(Matcher("name", name), scheme, source)


def test_policy_rules_come_before_checkpoint_rules():
    policy = QuantPlan((rule("a.up", ONLINE), rule("a.down", None)), source="policy.yaml")
    checkpoint = QuantPlan((rule("a.up", FP8), rule("a.down", FP8), rule("a.o", FP8)), source="c")
    merged = policy.merged_with(checkpoint)
    assert merged.resolve("a.up") == ONLINE
    assert merged.resolve("a.down") is None
    assert merged.resolve("a.o") == FP8
    assert merged.source == "policy.yaml over c"


def test_one_policy_rule_leaves_the_rest_of_the_checkpoint_quantized():
    merged = QuantPlan((rule("lm_head", ONLINE),)).merged_with(QuantPlan(default=FP8))
    assert merged.resolve("a.b") == FP8
    assert merged.resolve("lm_head") == ONLINE


def test_a_policy_default_takes_no_layer_from_a_checkpoint_rule():
    merged = QuantPlan(default=ONLINE).merged_with(QuantPlan((rule("a", FP8), rule("b", None))))
    assert merged.resolve("a") == FP8
    assert merged.resolve("b") is None
    assert merged.resolve("c") == ONLINE


def test_two_defaults_are_refused_unless_equal():
    assert QuantPlan(default=FP8).merged_with(QuantPlan(default=FP8)).default == FP8
    with pytest.raises(QuantConfigError) as error:
        QuantPlan(default=ONLINE, source="p.yaml").merged_with(QuantPlan(default=FP8, source="c"))
    assert "p.yaml has the default weight int4 block[1,128]" in str(error.value)
    assert "c has the default weight fp8_e4m3 per_channel" in str(error.value)


def test_the_cache_of_the_policy_goes_first():
    other = TensorQuant("int8", "per_tensor")
    assert QuantPlan(kv_cache=KV).merged_with(QuantPlan(kv_cache=other)).kv_cache == KV
    assert QuantPlan().merged_with(QuantPlan(kv_cache=other)).kv_cache == other


def test_merging_with_nothing_changes_nothing():
    plan = QuantPlan((rule("a", FP8),), INT8, KV, "x")
    for merged in (plan.merged_with(QuantPlan()), QuantPlan().merged_with(plan)):
        assert merged == plan
        assert merged.source == "x"


def test_rules_in_front_override():
    plan = QuantPlan((rule("a.b", FP8),), INT8, KV, "x")
    changed = plan.with_rules([rule("a.b", None), rule("c", FP8)])
    assert changed.resolve("a.b") is None
    assert changed.resolve("c") == FP8
    assert changed.resolve("d") == INT8
    assert (changed.kv_cache, changed.source) == (KV, "x")
    assert plan.resolve("a.b") == FP8


def test_unmatched_entries_warn_once_with_file_key_and_entry():
    source = "config.json: quantization_config.ignore: model.tower"
    subtree = (
        Rule(Matcher("name", "model.tower"), None, source),
        Rule(Matcher("glob", "model.tower.*"), None, source),
    )
    plan = QuantPlan((*subtree, rule("a.b", None, "s"), rule("typo", FP8)))
    with pytest.warns(UserWarning, match="matches no layer") as caught:
        unused = warn_unmatched(plan, ["a.b", "a.c"])
    assert unused == (*subtree, plan.rules[3])
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    assert source in texts[0]
    assert "name 'typo' -> weight fp8_e4m3 per_channel" in texts[1]


def test_nothing_warns_when_all_entries_match():
    plan = QuantPlan((rule("a.b", None), Rule(Matcher("module_cls", "Linear"), FP8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert warn_unmatched(plan, ["a.b"]) == ()
        assert warn_unmatched(plan, {"a.b": "Linear"}) == ()
