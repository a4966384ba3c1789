import json

import pytest
from torch import nn

from phyai_quant import Matcher, QuantConfigError, QuantPlan, QuantScheme, Rule, TensorQuant

INT8 = QuantScheme(TensorQuant("int8", "per_channel"))
FP8 = QuantScheme(TensorQuant("fp8_e4m3", "per_channel"))
ATTN = "model.layers.0.self_attn"


class RowParallelLinear(nn.Linear):
    pass


def plan(*rules, default=None):
    return QuantPlan(tuple(Rule(Matcher(k, p), s, f"{k} {p}") for k, p, s in rules), default)


@pytest.mark.parametrize(
    ("kind", "pattern", "prefix", "expected"),
    [
        ("name", "a.b.down_proj", "a.b.down_proj", True),
        ("name", "down_proj", "a.b.down_proj", True),
        ("name", "down", "a.b.down_proj", False),
        ("name", "b.down_proj", "a.b.down_proj", False),
        ("name", "a.b", "a.b.down_proj", False),
        ("name", "o_proj", "a.qko_proj", False),
        ("name", "linear", "time_mlp.linear", True),
        ("glob", "*.mlp.*", "a.mlp.down_proj", True),
        ("glob", "a.*", "a.b.c", True),
        ("glob", "b.*", "a.b.c", False),
        ("glob", "*.MLP.*", "a.mlp.down_proj", False),
        ("glob", "layers.1", "layers.10", False),
        ("regex", r"a\.b", "a.b.c", True),
        ("regex", r"b\.c", "a.b.c", False),
        ("regex", r"a\.b$", "a.b.c", False),
        ("module_cls", "Linear", "a", False),
    ],
)
def test_matcher_kinds(kind, pattern, prefix, expected):
    assert Matcher(kind, pattern).matches(prefix) is expected


@pytest.mark.parametrize(
    ("pattern", "module_cls", "expected"),
    [
        ("Linear", "QKVParallelLinear", True),
        ("Linear", RowParallelLinear, True),
        ("nn", RowParallelLinear, False),
        ("RowParallel", nn.Linear, False),
        ("Module", RowParallelLinear, True),
        ("object", RowParallelLinear, False),
    ],
)
def test_class_matcher_looks_at_bases(pattern, module_cls, expected):
    assert Matcher("module_cls", pattern).matches("a.b", module_cls) is expected


@pytest.mark.parametrize(
    ("pattern", "prefix"),
    [
        ("model.layers.1.ple.key_proj", "layers.1.ple.key_proj"),
        ("layers.1.ple.key_proj", "model.layers.1.ple.key_proj"),
        ("model.language_model.layers.1.ple.key_proj", "model.layers.1.ple.key_proj"),
        ("layers.0.q_proj.linear", "layers.0.q_proj"),
        ("layers.0.q_proj", "layers.0.q_proj.linear"),
        ("layers.0.q_proj.base_layer", "model.layers.0.q_proj"),
    ],
)
def test_roots_and_wrappers_do_not_hide_a_name(pattern, prefix):
    assert Matcher("name", pattern).matches(prefix)


@pytest.mark.parametrize("pattern", ["model.*", "language_model.*", "model.language_model.?*"])
def test_a_root_glob_does_not_cover_everything(pattern):
    assert not Matcher("glob", pattern).matches("vision.layers.0.fc1")


def test_a_glob_ignores_root_differences():
    assert Matcher("glob", "model.layers.0*").matches("layers.0.mlp.up_proj")
    assert Matcher("glob", "layers.0*").matches("model.language_model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("kind", "pattern", "text"),
    [
        ("prefix", "a", "unknown matcher kind 'prefix'; allowed: name, glob, regex, module_cls"),
        ("name", "", "needs a non-empty string"),
        ("glob", None, "needs a non-empty string, not None"),
        ("regex", "(", "invalid regular expression '('"),
        ("regex", "a{99999999999999999999}", "invalid regular expression 'a{"),
        ("name", ".transformer.layers.31.mlp.fc2", "has an empty segment"),
        ("name", "a..b", "has an empty segment"),
    ],
)
def test_bad_matchers_are_refused(kind, pattern, text):
    with pytest.raises(QuantConfigError) as error:
        Matcher(kind, pattern)
    assert text in str(error.value)


def test_first_match_wins_and_none_is_a_decision():
    rules = plan(
        ("name", "lm_head", None), ("glob", "*.mlp.*", INT8), ("glob", "*", FP8), default=INT8
    )
    assert rules.resolve("model.lm_head") is None
    assert rules.resolve("a.mlp.down_proj") == INT8
    assert rules.resolve("a.attn.o_proj") == FP8
    assert QuantPlan(default=INT8).resolve("x") == INT8
    assert QuantPlan().resolve("x") is None


@pytest.mark.parametrize("prefix", ["", ".a", "a.", "a..b"])
def test_names_with_empty_segments_are_refused(prefix):
    with pytest.raises(QuantConfigError, match="empty segment"):
        plan(("glob", "*", INT8)).resolve(prefix)


@pytest.mark.parametrize(
    "names",
    [
        [f"{ATTN}.qkv_proj"],
        [f"{ATTN}.q_proj", f"{ATTN}.k_proj", f"{ATTN}.v_proj"],
        ["q_proj", "k_proj", "v_proj"],
    ],
    ids=["fused", "legs", "bare"],
)
@pytest.mark.parametrize("prefix", ["qkv_proj", "q_proj", "k_proj", "v_proj"])
def test_fused_name_and_legs_both_match(names, prefix):
    rules = plan(*[("name", name, None) for name in names], default=FP8)
    assert rules.resolve(f"{ATTN}.{prefix}") is None
    assert rules.resolve(f"{ATTN}.o_proj") == FP8


def test_gate_up_is_fused_too():
    legs = plan(("name", "gate_proj", INT8), ("regex", r".*\.up_proj", INT8))
    assert legs.resolve("a.mlp.gate_up_proj") == INT8
    assert plan(("glob", "*.gate_up_proj", INT8)).resolve("a.mlp.up_proj") == INT8


def test_disagreeing_legs_are_listed():
    rules = plan(("name", f"{ATTN}.k_proj", None), ("glob", "*", FP8))
    with pytest.raises(QuantConfigError) as error:
        rules.resolve(f"{ATTN}.qkv_proj")
    text = str(error.value)
    assert f"{ATTN}.qkv_proj" in text
    assert f"{ATTN}.k_proj: unquantized [name '{ATTN}.k_proj'" in text
    assert f"{ATTN}.q_proj: weight fp8_e4m3 per_channel" in text
    assert f"{ATTN}.v_proj" in text


def test_quantizing_one_projection_says_nothing_about_others():
    rules = plan(("name", f"{ATTN}.o_proj", FP8))
    assert rules.resolve(f"{ATTN}.o_proj") == FP8
    assert rules.resolve(f"{ATTN}.qkv_proj") is None


def test_other_fused_layers_name_their_legs():
    leaves = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_g", "in_proj_fab")
    rules = plan(*[("name", f"a.{leaf}", None) for leaf in leaves], default=FP8)
    assert rules.resolve("a.in_proj_qkvgfab", legs=leaves) is None
    assert rules.resolve("a.in_proj_qkvgfab") == FP8
    with pytest.raises(QuantConfigError, match="in_proj_x"):
        rules.resolve("a.in_proj_qkvgfab", legs=(*leaves, "in_proj_x"))


def test_legs_may_have_other_names_in_the_checkpoint():
    stored = ("layers.0.to_q", "layers.0.to_k", "layers.0.to_v")
    rules = plan(("regex", r"layers\.0\.to_[qk]", FP8), ("name", "gen.v_proj", INT8))
    decision = rules.explain("gen.qkv_proj", stored=stored)
    assert [leg.scheme for leg in decision.legs] == [FP8, FP8, INT8]
    assert [leg.matched_name for leg in decision.legs] == [*stored[:2], "gen.v_proj"]
    assert rules.resolve("gen.to_out", stored=("layers.0.to_q",)) == FP8
    assert rules.resolve("gen.qkv_proj", legs=("q_proj",)) is None
    with pytest.raises(QuantConfigError, match="empty segment"):
        rules.resolve("gen.to_out", stored=("layers..to_q",))


def test_explain_names_the_rule_and_survives_disagreement():
    rules = plan(("name", "k_proj", None), default=FP8)
    decision = rules.explain(f"{ATTN}.qkv_proj")
    assert not decision.agrees
    assert "legs disagree" in str(decision)
    assert [leg.rule is None for leg in decision.legs] == [True, False, True]
    assert decision.legs[1].matched_name == f"{ATTN}.k_proj"
    single = rules.explain("a.o_proj")
    assert single.agrees
    assert "a.o_proj: weight fp8_e4m3 per_channel" in str(single)
    assert "no rule matched, default" in str(single)


def test_unmatched_reports_entries_that_match_nothing():
    rules = plan(
        ("name", "a.q_proj", None),
        ("name", "a.typo", None),
        ("regex", r"b\.", INT8),
        ("module_cls", "Conv", INT8),
    )
    unused = rules.unmatched(["a.qkv_proj", "c"])
    assert [rule.matcher.pattern for rule in unused] == ["a.typo", r"b\."]
    by_class = rules.unmatched({"a.qkv_proj": nn.Linear, "b.c": "Conv3d"})
    assert [rule.matcher.pattern for rule in by_class] == ["a.typo"]


def test_unmatched_treats_one_entry_of_two_rules_as_one():
    entry = (
        Rule(Matcher("name", "tower"), None, "ignore: tower"),
        Rule(Matcher("glob", "tower.*"), None, "ignore: tower"),
    )
    assert QuantPlan(entry).unmatched(["tower.fc1"]) == ()
    assert QuantPlan(entry).unmatched(["head"]) == entry


def test_source_is_no_part_of_equality():
    first = Rule(Matcher("name", "a"), INT8, "one")
    assert first == Rule(Matcher("name", "a"), INT8, "two")
    assert QuantPlan((first,), source="x") == QuantPlan((first,), source="y")


def test_as_dict_is_json_and_tells_plans_apart():
    plans = [
        QuantPlan(),
        QuantPlan(default=INT8),
        plan(("name", "a", INT8)),
        plan(("glob", "a", INT8)),
        plan(("name", "a", None)),
        QuantPlan(kv_cache=TensorQuant("fp8_e4m3", "per_tensor")),
    ]
    assert len({json.dumps(p.as_dict(), sort_keys=True) for p in plans}) == len(plans)
