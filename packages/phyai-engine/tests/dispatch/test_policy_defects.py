"""Known defects of policy systems like this one, each with a test that ours does it right."""

import pytest

from phyai.dispatch import (
    KernelConfig,
    KernelQuery,
    ModelContext,
    NoKernelError,
    PolicyError,
    Selector,
    load_policy,
    policy_from_mapping,
    resolve_policy,
)
from phyai.dispatch.bootstrap import initialize_kernel_system
from phyai.dispatch.types import KernelMode
from phyai_quant import QuantConfigError
from phyai_quant.checkpoint import check_unquantized_dtypes

TOY = {"op": "toy"}
QUANTIZATION = {"rules": [{"match": {"glob": "*"}, "weight": {"dtype": "int8"}}]}


@pytest.fixture(autouse=True)
def _libraries(monkeypatch):
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)


def selector(data, catalog, **facts):
    return Selector(catalog, policy_from_mapping(data, catalog=catalog), device="cpu", **facts)


def toy_query(dtype="bf16", **facts):
    return KernelQuery.build("toy", dtype=dtype, **facts)


def test_a_glob_keeps_the_priority_order_of_the_catalog(toy, catalog):
    """11.1: names of a pattern in alphabetical order made the slowest row win."""
    chosen = selector({"rules": [{"restrict_to": "*.toy"}]}, toy)
    assert chosen.select(toy_query()).kernel_id == "fast.toy"
    ids = policy_from_mapping({"rules": [{"restrict_to": "*.gemm.*"}]}, catalog=catalog)
    named = [catalog.impl(name).priority for name in ids.rules[0].candidates(catalog)]
    assert named == sorted(named, reverse=True)
    assert named[0] > named[-1]


def test_an_override_with_a_glob_takes_any_row_it_names(toy):
    """11.2: only the alphabetically first row of the pattern counted."""
    forced = selector({"overrides": [{"match": TOY, "restrict_to": "*.toy"}]}, toy)
    assert forced.select(toy_query("fp32")).kernel_id == "mid.toy"
    assert forced.select(toy_query("bf16")).kernel_id == "fast.toy"
    only = selector({"overrides": [{"match": TOY, "restrict_to": "f*.toy"}]}, toy)
    with pytest.raises(NoKernelError, match="override 'override-0'"):
        only.select(toy_query("fp32"))


def test_a_profile_from_outside_keeps_the_quantization(monkeypatch, tmp_path, catalog):
    """11.5: changing the profile rebuilt the policy without its quantization."""
    config = KernelConfig(policy_config={"quantization": QUANTIZATION}, profile="autotune")
    policy = resolve_policy(config, catalog)
    assert (policy.profile, len(policy.quant_plan.rules)) == ("autotune", 1)
    file = tmp_path / "policy.yaml"
    file.write_text("quantization: {rules: [{match: {glob: '*'}, weight: {dtype: int8}}]}\n")
    monkeypatch.setenv("PHYAI_KERNEL_CONFIG", str(file))
    monkeypatch.setenv("PHYAI_KERNEL_PROFILE", "autotune")
    policy = initialize_kernel_system(device="cpu").policy
    assert (policy.profile, len(policy.quant_plan.rules)) == ("autotune", 1)


@pytest.mark.parametrize("given", ["policy_config", "config_path"])
def test_the_environment_wins_over_a_policy_in_code(monkeypatch, tmp_path, given):
    """11.6: naming a policy in both places was an error instead."""
    outer, inner = tmp_path / "outer.yaml", tmp_path / "inner.yaml"
    outer.write_text("rules: [{id: outer, prefer: torch.rmsnorm}]\n")
    inner.write_text("rules: [{id: inner, prefer: torch.rmsnorm}]\n")
    monkeypatch.setenv("PHYAI_KERNEL_CONFIG", str(outer))
    value = inner if given == "config_path" else {"rules": [{"prefer": "torch.rmsnorm"}]}
    policy = initialize_kernel_system(KernelConfig(**{given: value}), device="cpu").policy
    assert [rule.id for rule in policy.rules] == ["outer"]


def test_fallback_error_holds_without_a_matching_rule(toy):
    """11.8: without a matching rule the reference ran although fallback was error."""
    strict = selector({"defaults": {"fallback": "error"}}, toy)
    quantized = {"format": "int8"}
    assert strict.select(toy_query("fp32")).kernel_id == "mid.toy"
    with pytest.raises(NoKernelError, match="fallback: error"):
        strict.select(toy_query("fp32", quant=quantized))
    relaxed = selector({}, toy)
    assert relaxed.select(toy_query("fp32", quant=quantized)).kernel_id == "slow.toy"


def test_fallback_of_a_rule_wins_over_the_default(toy):
    """11.8: a rule can forbid, or allow, the reference for its own calls."""
    quantized = toy_query("fp32", quant={"format": "int8"})
    rule = {"match": TOY, "prefer": "fast.toy"}
    with pytest.raises(NoKernelError, match="rule 'rule-0'"):
        selector({"rules": [{**rule, "fallback": "error"}]}, toy).select(quantized)
    both = {"defaults": {"fallback": "error"}, "rules": [{**rule, "fallback": "reference"}]}
    assert selector(both, toy).select(quantized).kernel_id == "slow.toy"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["{id: a, prefer: torch.rmsnorm}", "{id: A, prefer: torch.layernorm}"], "duplicate"),
        (
            [
                "{id: a, match: {op: gemm, role: x}, prefer: torch.gemm.bf16}",
                "{id: b, match: {op: gemm, shape.M: 4}, restrict_to: '*.gemm.*'}",
            ],
            "'b' and 'a' (line 2) have the same priority 0 and both match the call",
        ),
    ],
    ids=["ids", "conflict"],
)
def test_twins_and_conflicts_are_found_when_the_file_is_loaded(tmp_path, catalog, rules, message):
    """11.9: duplicate ids were accepted, conflicts waited for the first call that hit them."""
    file = tmp_path / "policy.yaml"
    file.write_text("rules:\n" + "".join(f"  - {rule}\n" for rule in rules))
    with pytest.raises(PolicyError) as caught:
        load_policy(file, catalog=catalog)
    assert message in str(caught.value)
    assert caught.value.line == 3


def test_an_unknown_mode_is_refused():
    """11.12: every unknown word became eager."""
    assert KernelMode.normalize("graph-capturing") is KernelMode.CAPTURE
    with pytest.raises(ValueError, match="captur"):
        KernelMode.normalize("captur")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ("weight: {dtype: int8}, input: {dtype: fp8_e4m3}", "no input or int8"),
        ("weight: {dtype: mxfp4}, input: {dtype: int8}", "input.dtype"),
        ("weight: {dtype: int4, block_shape: [1, 100]}", "a power of two"),
        ("weight: {dtype: int4, symmetric: false}", "symmetric"),
        ("weight: {dtype: nvfp4, block_shape: [1, 32]}", "[1, 16]"),
        ("weight: {dtype: int4, rotation_group: 64}, input: {dtype: int8}", "rotation_group"),
    ],
)
def test_schemes_that_nothing_runs_fail_with_the_line_of_the_field(
    tmp_path, catalog, tensors, message
):
    """11.15: pairs and group sizes were checked only when the first layer was built."""
    file = tmp_path / "policy.yaml"
    file.write_text(
        "quantization:\n  rules:\n    - match: {glob: '*'}\n"
        + "".join(f"      {part}}}\n" for part in tensors.rstrip("}").split("}, "))
    )
    with pytest.raises(PolicyError) as caught:
        load_policy(file, catalog=catalog)
    assert message in str(caught.value)
    assert caught.value.line in (4, 5)


@pytest.mark.parametrize(
    "params",
    ["{compute_config: {speed: 1}}", "{compute_config: 4}", "{tuning_config: [[0, -1, {}]]}"],
)
def test_bad_params_are_errors_of_the_policy_not_of_the_row(tmp_path, catalog, params):
    """11.16: they looked like a row that cannot be prepared, and another row ran."""
    file = tmp_path / "policy.yaml"
    file.write_text(f"rules:\n  - prefer: humming.gemm.w4a16\n    params: {params}\n")
    with pytest.raises(PolicyError, match=r"policy\.yaml:3: rules\[0\]\.params"):
        load_policy(file, catalog=catalog)


def test_locks_beyond_those_of_a_layer_are_refused_at_load(tmp_path, catalog):
    """11.19: the launcher failed at the first call."""
    file = tmp_path / "policy.yaml"
    file.write_text(
        "rules:\n  - prefer: humming.gemm.w4a16\n"
        "    params: {tuning_config: [[0, 64, {num_ctas_per_sm: 32}]]}\n"
    )
    with pytest.raises(PolicyError, match=r"policy\.yaml:3: .*needs 6758 locks.*holds 4096; lower"):
        load_policy(file, catalog=catalog)


def test_rules_on_tags_fire_where_tags_are_given(catalog):
    """11.17: shipped rules matched tags that nothing ever set."""
    data = {"rules": [{"match": {"model.tags": "fast"}, "prefer": "torch.rmsnorm"}]}
    query = KernelQuery.build("rmsnorm", dtype={"input": "fp32", "weight": "fp32"})
    tagged = selector(data, catalog, model=ModelContext("pi05", frozenset({"fast"})))
    assert tagged.explain(query).matched_rules == ("rule-0",)
    assert selector(data, catalog).explain(query).matched_rules == ()


def test_no_shipped_policy_depends_on_tags(catalog):
    """11.17: the engine sets none, so such a rule could never fire."""
    from pathlib import Path

    files = [*(Path(__file__).parents[4] / "examples").glob("*/kernel_polic*/*.yaml")]
    assert files
    for file in files:
        assert "model.tags" not in load_policy(file, catalog=catalog).paths(), file


def test_none_of_a_fact_that_was_not_given_holds(toy):
    """11.18: an optional fact left out satisfied the condition, so its negation failed."""
    rule = {"match": {**TOY, "none_of": [{"attrs.window": 4}]}, "prefer": "slow.toy"}
    chosen = selector({"rules": [rule]}, toy)
    assert chosen.select(toy_query()).kernel_id == "slow.toy"
    assert chosen.select(toy_query(attrs={"window": 8})).kernel_id == "slow.toy"
    assert chosen.select(toy_query(attrs={"window": 4})).kernel_id == "fast.toy"


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("rules: [{pin: torch.rmsnorm}]", "a pin is an entry of 'overrides' with 'use'"),
        ("rules: [{use: torch.rmsnorm}]", "a pin is an entry of 'overrides' with 'use'"),
        ("overrides: [{pin: torch.rmsnorm}]", "did you mean 'use'?"),
        ("overrides: [{prefer: torch.rmsnorm}]", "'prefer' belongs to 'rules'"),
    ],
)
def test_the_word_pin_is_explained(tmp_path, catalog, text, advice):
    """11.22: the documentation says pin, the file has no such key."""
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(PolicyError) as caught:
        load_policy(file, catalog=catalog)
    assert advice in str(caught.value)


def test_a_policy_never_makes_quantized_tensors_look_unquantized(catalog):
    """11.23: the policy's plan hid that of the checkpoint, whose codes were loaded as weights."""
    rule = {"match": {"glob": "*.mlp.*"}, "weight": {"dtype": "int8"}}
    policy = policy_from_mapping({"quantization": {"rules": [rule]}}, catalog=catalog)
    check_unquantized_dtypes({"layers.0.self_attn.q_proj.weight": "BF16"}, policy.quant_plan)
    stored = {"layers.0.self_attn.q_proj.weight": "F8_E4M3"}
    with pytest.raises(QuantConfigError, match="self_attn"):
        check_unquantized_dtypes(stored, policy.quant_plan)


def test_a_rule_on_a_size_waits_for_calls_that_state_it(toy):
    """11.24: without M a rule on M does not match, and it is neither an error nor remembered."""
    rule = {"match": {**TOY, "shape.M": "<8"}, "prefer": "slow.toy"}
    chosen = selector({"rules": [rule]}, toy)
    assert chosen.select(toy_query()).kernel_id == "fast.toy"
    assert chosen.select(toy_query(dims={"M": 4})).kernel_id == "slow.toy"
    assert chosen.select(toy_query(dims={"M": 64})).kernel_id == "fast.toy"
