"""The policy file: grammar, every error with its line, conflicts, fingerprint."""

import datetime

import pytest

from phyai.dispatch import Policy, PolicyError, load_policy, policy_from_mapping
from phyai.dispatch.facts import Facts
from phyai.dispatch.types import Fallback, Profile

RULE = {"prefer": "torch.rmsnorm"}


def parse(data, catalog):
    return policy_from_mapping(data, catalog=catalog)


def matches(catalog, match, **facts):
    policy = parse({"rules": [{"match": match, "restrict_to": "*.gemm.*"}]}, catalog)
    entry = catalog.entry("gemm")
    values = Facts({"op": "gemm", **facts}, kinds=entry.kinds, optional=entry.optional)
    return policy.decide(values, catalog).rule is not None


def test_empty_policies(load, catalog):
    for policy in (load(""), load("---\n"), parse(None, catalog), parse({}, catalog)):
        assert policy.version == Policy().version
        assert policy.profile is Profile.STATIC
        assert policy.fallback is Fallback.REFERENCE
        assert policy.quant_plan is None


def test_product_example(load, catalog):
    policy = load("""
        schema: phyai.kernel/v1
        profile: static

        rules:
          - id: pi05-expert-fa2
            priority: 10
            match:
              op: attention_paged
              role: expert
              model.family: pi05
              device.arch: sm90
            restrict_to: flashinfer.attention_paged.fa2
        """)
    (rule,) = policy.rules
    assert rule.priority == 10
    assert rule.candidates(catalog) == ("flashinfer.attention_paged.fa2",)
    assert rule.line == 5
    expected = (
        "op == 'attention_paged' and role == 'expert' and model.family == 'pi05' and "
        "device.arch == 'sm90'"
    )
    assert rule.match.render() == expected


@pytest.mark.parametrize("schema", ["phyai.kernel/v1", "v1", "1", 1, "V1"])
def test_accepted_schemas(catalog, schema):
    parse({"schema": schema}, catalog)


@pytest.mark.parametrize(
    ("match", "facts", "expected"),
    [
        ({"shape.M": 4}, {"shape.M": 4}, True),
        ({"shape": {"M": "<=8"}}, {"shape.M": 8}, True),
        ({"shape.M": "< 8"}, {"shape.M": 8}, False),
        ({"shape.M": "!=8"}, {"shape.M": 8}, False),
        ({"shape.M": "==8"}, {"shape.M": 8}, True),
        ({"shape.K": "%64"}, {"shape.K": 128}, True),
        ({"shape.K": "%64==1"}, {"shape.K": 65}, True),
        ({"shape.M": [1, 2]}, {"shape.M": 2}, True),
        ({"quant.layout": None}, {"quant.layout": None}, True),
        ({"quant.layout": None}, {"quant.layout": "humming"}, False),
        ({"quant.layout": [None, "humming"]}, {"quant.layout": None}, True),
        ({"device.arch": ">=sm80"}, {"device.arch": "sm90"}, True),
        ({"device.arch": ">=sm100"}, {"device.arch": "sm90"}, False),
        ({"device.arch": ["sm90", "sm100"]}, {"device.arch": "sm90"}, True),
        ({"dtype.input": "bfloat16"}, {"dtype.input": "bf16"}, True),
        ({"model.tags": "fast"}, {"model.tags": ["fast", "x"]}, True),
        ({"model": {"tags": ["slow", "x"]}}, {"model.tags": ["fast", "x"]}, True),
        ({"quant.fields.activation": "a16"}, {"quant.fields.activation": "a16"}, True),
        ({"any_of": [{"shape.M": 1}, {"shape.M": 2}]}, {"shape.M": 2}, True),
        ({"all_of": [{"shape.M": ">=1"}, {"shape.M": "<=64"}]}, {"shape.M": 65}, False),
        ({"none_of": [{"shape.M": 1}]}, {"shape.M": 2}, True),
        ({"none_of": [{"dtype.weight": "fp32"}]}, {}, True),
        ({"when": {"if": {"shape.M": 1}, "then": {"shape.K": 2}}}, {"shape.M": 3}, True),
        (
            {"when": {"if": {"shape.M": 1}, "then": {"shape.K": 2}}},
            {"shape.M": 1, "shape.K": 3},
            False,
        ),
        ({"shape.M": 4}, {}, False),
        ({"lib.humming": True}, {}, False),
    ],
)
def test_matcher_grammar(catalog, match, facts, expected):
    assert matches(catalog, match, **facts) is expected


def test_boolean_facts_of_an_operation_take_yaml_12_words(load, catalog):
    policy = load("""
        rules:
          - match: {op: activation, attrs.gated: yes}
            restrict_to: torch.activation.*
        """)
    entry = catalog.entry("activation")
    facts = Facts({"op": "activation", "attrs.gated": True}, kinds=entry.kinds)
    assert policy.decide(facts, catalog).rule is not None


def test_yes_and_off_stay_strings(load):
    policy = load("rules:\n  - {match: {model.family: no}, prefer: torch.rmsnorm}\n")
    assert "model.family == 'no'" in policy.rules[0].match.render()
    with pytest.raises(PolicyError, match=r"policy\.yaml:1: profile: .*got 'off'"):
        load("profile: off\n")


def test_rule_concerns_only_the_operations_it_names(catalog):
    policy = parse({"rules": [{"match": {"model.family": "pi05"}, **RULE}]}, catalog)
    assert policy.rules[0].match.render().startswith("op in {'rmsnorm'}")


def test_missing_and_unreadable_files(tmp_path, catalog):
    with pytest.raises(PolicyError, match=r"absent\.yaml: cannot read"):
        load_policy(tmp_path / "absent.yaml", catalog=catalog)
    with pytest.raises(PolicyError, match="cannot read"):
        load_policy(tmp_path, catalog=catalog)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(PolicyError, match=r"binary\.yaml"):
        load_policy(binary, catalog=catalog)
    binary.write_bytes(b"a: \x07\n")
    with pytest.raises(PolicyError, match=r"binary\.yaml:1"):
        load_policy(binary, catalog=catalog)


def test_aliases_work_but_do_not_explode(load):
    policy = load("""
        rules:
          - {match: &m {op: rmsnorm, role: a}, prefer: torch.rmsnorm, priority: 1}
          - {match: *m, prefer: torch.rmsnorm, priority: 2}
        """)
    assert policy.rules[0].match == policy.rules[1].match
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 8)
    )
    with pytest.raises(PolicyError, match="more than 20000 values"):
        load(laughs)


@pytest.mark.parametrize(
    "data",
    [
        {"rules": [{"match": {"role": datetime.date(2026, 1, 1)}, **RULE}]},
        {"rules": [{"match": {1: "x"}, **RULE}]},
        {"rules": [{"match": {"role": {"x"}}, **RULE}]},
        {1: 2},
        [1],
        {"rules": [{"match": {"shape.M": float("nan")}, **RULE}]},
    ],
)
def test_odd_python_values_are_policy_errors(catalog, data):
    with pytest.raises(PolicyError):
        parse(data, catalog)


def test_self_referencing_python_data(catalog):
    loop = []
    loop.append(loop)
    with pytest.raises(PolicyError, match="nested deeper"):
        parse({"rules": loop}, catalog)


def test_priority_and_overrides(catalog):
    policy = parse(
        {
            "rules": [
                {"id": "low", "match": {"op": "gemm"}, "prefer": "torch.gemm.bf16"},
                {"id": "high", "match": {"op": "gemm"}, "prefer": "torch.gemm.bf16", "priority": 1},
            ],
            "overrides": [{"id": "pin", "match": {"role": "y"}, "use": "torch.gemm.bf16"}],
        },
        catalog,
    )
    assert policy.decide(Facts({"op": "gemm", "role": "x"}), catalog).matched_rules == ("high",)
    pinned = policy.decide(Facts({"op": "gemm", "role": "y"}), catalog)
    assert pinned.matched_rules == ("pin",)
    assert pinned.strict


def test_version_ignores_spelling_and_source_but_not_content(load, catalog):
    nested = load("rules:\n  - {match: {device: {arch: SM90}}, prefer: torch.rmsnorm}\n")
    flat = parse(
        {"rules": [{"match": {"device.arch": "sm90"}, "prefer": ["Torch.RMSNorm"]}]}, catalog
    )
    assert nested.version == flat.version
    assert len(nested.version) == 16
    variants = [
        {"profile": "autotune"},
        {"defaults": {"fallback": "error"}},
        {"rules": [{**RULE, "priority": 1}]},
        {"rules": [{**RULE, "id": "x"}]},
        {"rules": [{**RULE, "match": {"role": "x"}}]},
        {"overrides": [{"use": "torch.rmsnorm"}]},
        {"rules": [{"prefer": "flashinfer.attention_paged"}]},
        {"rules": [{"prefer": "flashinfer.attention_paged", "params": {"prefill_backend": "fa2"}}]},
        {"rules": [{**RULE, "fallback": "error"}]},
        {"quantization": {"rules": [{"match": {"glob": "*"}, "weight": {"dtype": "int8"}}]}},
        {"quantization": {"rules": [{"match": {"glob": "a"}, "weight": {"dtype": "int8"}}]}},
    ]
    versions = {parse(data, catalog).version for data in ({}, {"rules": [RULE]}, *variants)}
    assert len(versions) == len(variants) + 2


def test_quantization_section_becomes_a_plan(load):
    policy = load("""
        quantization:
          method: rtn
          stage: load
          rules:
            - match: {glob: "*.mlp.*"}
              weight: {dtype: int4, granularity: block, block_shape: [1, 128]}
        """)
    assert policy.quant_plan is not None
    scheme = policy.quant_plan.resolve("layers.0.mlp.up_proj")
    assert scheme.weight.block_shape == (1, 128)
    assert policy.quant_plan.resolve("layers.0.self_attn.q_proj") is None
