"""Errors of the policy file: each names file, line and what may stand there."""

import pytest

from phyai.dispatch import PolicyError


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
