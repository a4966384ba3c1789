"""The policy file: grammar, every error with its line, conflicts, fingerprint."""

import datetime
import textwrap

import pytest

from phyai.dispatch import Policy, PolicyError, load_policy, policy_from_mapping
from phyai.dispatch.facts import Facts
from phyai.dispatch.types import Fallback, Profile

RULE = {"prefer": "torch.rmsnorm"}


@pytest.fixture
def load(tmp_path, catalog):
    def write(text):
        path = tmp_path / "policy.yaml"
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
        return load_policy(path, catalog=catalog)

    return write


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


@pytest.mark.parametrize(
    ("line", "message", "text"),
    [
        (1, "unknown key 'rulez'; did you mean 'rules'", "rulez: []\n"),
        (1, "unsupported schema 'v2'", "schema: v2\n"),
        (1, "unsupported schema True", "schema: true\n"),
        (1, "got 'fast'", "profile: fast\n"),
        (2, "unknown key 'fallbak'; did you mean 'fallback'", "defaults:\n  fallbak: error\n"),
        (2, "must be one of reference, error, got 'maybe'", "defaults:\n  fallback: maybe\n"),
        (1, "must be a mapping", "defaults: 3\n"),
        (1, "must be a list", "rules: {a: 1}\n"),
        (1, "a policy is a mapping, got list", "- a\n"),
        (1, "a policy is a mapping, got str", "hello\n"),
        (1, "a policy is a mapping, got list", "[]\n"),
        (1, "a policy is a mapping, got bool", "false\n"),
        (2, "must be a mapping, got 'x'", "rules:\n  - x\n"),
        (
            3,
            "duplicate key 'priority' (lines 2 and 3)",
            "rules:\n  - priority: 10\n    priority: 1\n",
        ),
        (1, "is not a plain value; quote it", "profile: =\n"),
        (1, "is not a plain value; quote it", "profile: 2026-01-01\n"),
        (1, "is not a plain value; quote it", "profile: .nan\n"),
        (1, "nested deeper than 40", "rules: " + "[" * 2000 + "\n"),
        (1, "nested deeper than 40", "rules: " + "[" * 60 + "]" * 60 + "\n"),
        (2, "malformed YAML", "rules:\n  - {a: ]\n"),
        (1, "key '1' is not a string; quote it", "1: x\n"),
        (1, "key a collection is not a string", "[a]: x\n"),
        (2, "merge keys", "rules:\n  - <<: {a: 1}\n"),
        (
            1,
            "tag tag:yaml.org,2002:python/object:os.system is not allowed",
            "!!python/object:os.system x\n",
        ),
        (2, "malformed YAML", "a: b\n---\nc: d\n"),
        (3, "malformed YAML: character #x07 is not allowed", "# a\n# b\nprofile: \x07\n"),
        (1, "alias contains itself", "rules: &a [*a]\n"),
        (2, "exactly one of prefer and restrict_to", "rules:\n  - id: a\n"),
        (
            2,
            "exactly one of prefer and restrict_to",
            "rules:\n  - {prefer: torch.rope, restrict_to: x}\n",
        ),
        (2, "unknown field 'use'", "rules:\n  - use: torch.rmsnorm\n"),
        (2, "unknown field 'prefers'; did you mean 'prefer'", "rules:\n  - prefers: x\n"),
        (2, "unknown field 'prefer'", "overrides:\n  - prefer: torch.rmsnorm\n"),
        (2, "exactly one of use and restrict_to", "overrides:\n  - id: a\n"),
        (
            3,
            "must be an integer, got 'high'",
            "rules:\n  - prefer: torch.rmsnorm\n    priority: high\n",
        ),
        (
            3,
            "must be an integer, got True",
            "rules:\n  - prefer: torch.rmsnorm\n    priority: true\n",
        ),
        (3, "must be a non-empty string", "rules:\n  - prefer: torch.rmsnorm\n    id: 5\n"),
        (3, "must be a mapping of facts", "rules:\n  - prefer: torch.rmsnorm\n    match: [a]\n"),
        (
            2,
            "unknown kernel 'torch.rmsnrm'; did you mean 'torch.rmsnorm'",
            "rules:\n  - prefer: torch.rmsnrm\n",
        ),
        (2, "pattern 'nothing.*' matches no kernel", "rules:\n  - restrict_to: nothing.*\n"),
        (2, "names a kernel twice", "rules:\n  - prefer: [torch.rmsnorm, torch.rmsnorm]\n"),
        (2, "must be an id or a list of ids", "rules:\n  - prefer: []\n"),
        (2, "must be an id, got 5", "rules:\n  - restrict_to: 5\n"),
        (
            5,
            "names kernels of operation rmsnorm, but the rule matches 'gemm'",
            "rules:\n  - match:\n      op: gemm\n    id: x\n    prefer: torch.rmsnorm\n",
        ),
        (
            4,
            "duplicate rule id 'a' (first on line 2)",
            "rules:\n  - {id: a, prefer: torch.rmsnorm, match: {role: x}}\n"
            "overrides:\n  - {id: A, use: torch.rmsnorm}\n",
        ),
        (
            3,
            "unknown parameter 'size'",
            "rules:\n  - prefer: torch.rmsnorm\n    params: {size: 1}\n",
        ),
        (3, "must be a mapping, got 4", "rules:\n  - prefer: torch.rmsnorm\n    params: 4\n"),
        (
            3,
            "prefill_backend is 'fa9'; allowed: auto, fa2",
            "rules:\n  - prefer: flashinfer.attention_paged\n    params: {prefill_backend: fa9}\n",
        ),
        (
            3,
            "compute_config has unknown key 'speed'",
            "rules:\n  - prefer: humming.gemm.w4a16\n    params: {compute_config: {speed: 1}}\n",
        ),
        (
            3,
            "use_f16_accum must be true or false, got 'maybe'",
            "rules:\n  - prefer: humming.gemm.w4a16\n"
            "    params: {compute_config: {use_f16_accum: maybe}}\n",
        ),
        (
            3,
            "tuning_config must be a mapping or a list",
            "rules:\n  - prefer: humming.gemm.w4a16\n    params: {tuning_config: [[1, 2]]}\n",
        ),
        (3, "must be one of reference", "rules:\n  - prefer: torch.rmsnorm\n    fallback: x\n"),
        (2, "expected a list", "quantization:\n  rules: 3\n"),
        (
            5,
            "int3",
            "quantization:\n  rules:\n    - match: {glob: a}\n      weight:\n        dtype: int3\n",
        ),
        (1, "must be a mapping, got 4", "quantization: 4\n"),
    ],
)
def test_errors_name_file_and_line(load, line, message, text):
    with pytest.raises(PolicyError) as caught:
        load(text)
    assert message in str(caught.value)
    assert f"policy.yaml:{line}: " in str(caught.value)
    assert str(caught.value).count("policy.yaml") == 1
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ("unknown fact 'shap.M'; did you mean 'shape.M'", "{op: gemm, shap.M: 1}"),
        ("no fact 'shape.m'; names are case-sensitive, write 'shape.M'", "{op: gemm, shape.m: 1}"),
        ("operation 'gemm' has no fact 'attrs.causal'", "{op: gemm, attrs.causal: true}"),
        ("unknown operation 'gem'; did you mean 'gemm'", "{op: gem}"),
        ("takes no patterns", "{role: 'exp*'}"),
        ("takes no patterns", "{device.arch: 'sm9?'}"),
        ("has no series; write 'sm90'", "{device.arch: '90'}"),
        ("takes strings; got 90, quote it", "{device.arch: 90}"),
        ("compares only with '>='", "{device.arch: '<sm90'}"),
        ("product name; write 'sm90'", "{device.arch: h200}"),
        ("no namespace and takes no mapping", "{role: {a: b}}"),
        ("not allowed inside a namespace", "{shape: {any_of: [{M: 1}]}}"),
        ("non-empty list of matchers", "{any_of: []}"),
        ("non-empty list of matchers", "{all_of: {shape.M: 1}}"),
        ("exactly 'if' and 'then'", "{when: {if: {shape.M: 1}}}"),
        ("is an integer; got 'many'", "{shape.M: many}"),
        ("is an integer; got True", "{shape.M: true}"),
        ("is an integer; got 1.5", "{shape.M: 1.5}"),
        ("has an empty list", "{shape.M: []}"),
        ("modulus 0", "{shape.M: '%0'}"),
        ("is true or false; got 'maybe'", "{op: attention, attrs.causal: maybe}"),
        ("is an empty mapping", "{shape: {}}"),
        ("takes plain values", "{shape.M: [[1]]}"),
        ("unknown operation 'gem'", "{op: [gemm, gem]}"),
    ],
)
def test_matcher_errors_name_the_line(load, message, match):
    text = f"rules:\n  - id: r\n    restrict_to: '*'\n    match: {match}\n"
    with pytest.raises(PolicyError) as caught:
        load(text)
    assert message in str(caught.value)
    assert "policy.yaml:4: rules[0].match" in str(caught.value)


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
