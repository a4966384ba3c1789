"""`phyai policy check`, `show`, `diff` and `schema`."""

import pytest

from phyai.dispatch import load_policy
from phyai.dispatch.policy_canonical import flat_match, to_yaml

POLICY = """\
schema: 1
rules:
  - id: Expert-FA2
    priority: 10
    match:
      role: expert
      op: attention_paged
      device: {arch: sm90}
    restrict_to: flashinfer.attention_paged.fa2
  - match:
      op: gemm
      any_of:
        - {shape: {M: "<=8"}}
        - {quant.layout: null}
    prefer: torch.gemm.bf16
overrides:
  - match: {op: rope, when: {if: {device.vendor: cpu}, then: {role: "on"}}}
    restrict_to: "*.rope*"
quantization:
  rules:
    - match: {glob: "*.mlp.*"}
      weight: {dtype: int4, block_shape: [1, 128]}
    - match: {glob: "*.self_attn.*"}
      weight: {dtype: int8, granularity: per_channel, rotation_group: 64}
      input: {dtype: int8, granularity: per_channel, dynamic: true}
    - match: {name: lm_head}
      scheme: null
"""


@pytest.fixture
def policy_file(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


def test_a_valid_policy_is_ok_with_a_summary(phyai, policy_file):
    result = phyai("policy", "check", policy_file)
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0] == f"OK  {policy_file}"
    assert "rules               2  (expert-fa2, rule-1)" in lines
    assert "overrides           1  (override-0)" in lines
    assert "quantization rules  3" in lines
    assert f"version             {load_policy(policy_file).version}" in lines


def test_an_empty_policy_is_ok(phyai, tmp_path):
    path = tmp_path / "empty.yaml"
    path.touch()
    result = phyai("policy", "check", path, "--json")
    assert result.code == 0
    assert result.json == {
        "file": str(path),
        "ok": True,
        "profile": "static",
        "fallback": "reference",
        "rules": [],
        "overrides": [],
        "quantization_rules": 0,
        "version": load_policy(path).version,
    }


@pytest.mark.parametrize("command", ["check", "show"])
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rules:\n  - id: a\n    priority: 10\n    priority: 1\n", 4),
        ("schema: v1\nruels: []\n", 2),
        ("rules:\n  - match: {op: gemm}\n    restrict_to: torch.gem.bf16\n", 3),
        ("quantization:\n  rules:\n    - match: {glob: x}\n      weight: {dtype: int3}\n", 4),
        ("a: [\n", None),
    ],
)
def test_a_fault_names_file_and_line(phyai, tmp_path, command, text, line):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    result = phyai("policy", command, path)
    assert result.code == 1
    assert result.out == ""
    expected = f"error: {path}:" if line is None else f"error: {path}:{line}: "
    assert result.err.startswith(expected)
    assert "Traceback" not in result.err


def test_a_missing_file_is_named(phyai, tmp_path):
    result = phyai("policy", "check", tmp_path / "gone.yaml", "--json")
    assert result.code == 1
    assert "gone.yaml" in result.err
    assert "gone.yaml" in result.json["error"]


def test_show_writes_out_defaults_and_dotted_paths(phyai, policy_file):
    document = phyai("policy", "show", policy_file, "--json").json
    assert document["schema"] == "phyai.kernel/v1"
    assert document["profile"] == "static"
    assert document["defaults"] == {"fallback": "reference"}
    assert document["rules"] == [
        {
            "id": "expert-fa2",
            "priority": 10,
            "match": {"device.arch": "sm90", "op": "attention_paged", "role": "expert"},
            "restrict_to": "flashinfer.attention_paged.fa2",
        },
        {
            "id": "rule-1",
            "priority": 0,
            "match": {"any_of": [{"shape.M": "<=8"}, {"quant.layout": None}], "op": "gemm"},
            "prefer": ["torch.gemm.bf16"],
        },
    ]
    first, second, third = document["quantization"]["rules"]
    assert first["weight"]["granularity"] == "block"
    assert first["weight"]["block_shape"] == [1, 128]
    assert second["weight"]["rotation_group"] == 64
    assert second["input"]["dynamic"] is True
    assert third == {"match": {"name": "lm_head"}, "scheme": None}


def test_the_shown_policy_is_a_policy_with_the_same_version(phyai, policy_file, tmp_path):
    shown = tmp_path / "shown.yaml"
    shown.write_text(phyai("policy", "show", policy_file).out)
    assert load_policy(shown).version == load_policy(policy_file).version
    assert phyai("policy", "show", shown).out == shown.read_text()


def test_an_empty_policy_can_be_shown(phyai, tmp_path):
    path = tmp_path / "empty.yaml"
    path.touch()
    shown = tmp_path / "shown.yaml"
    shown.write_text(phyai("policy", "show", path).out)
    assert load_policy(shown).version == load_policy(path).version


def test_nested_matches_become_flat():
    match = {
        "shape": {"M": ">=1"},
        "op": "gemm",
        "quant": {"fields": {"activation": "int8"}},
        "none_of": [{"device": {"vendor": "cpu"}}],
        "when": {"if": {"model": {"family": "pi05"}}, "then": {"role": "a"}},
    }
    assert flat_match(match) == {
        "shape.M": ">=1",
        "op": "gemm",
        "quant.fields.activation": "int8",
        "none_of": [{"device.vendor": "cpu"}],
        "when": {"if": {"model.family": "pi05"}, "then": {"role": "a"}},
    }
    assert list(flat_match(match)) == [
        "shape.M",
        "op",
        "quant.fields.activation",
        "none_of",
        "when",
    ]
    assert flat_match(None) == {}


def test_two_conditions_on_one_path_both_stay():
    match = {"shape.M": ">=1", "all_of": [{"role": "a"}], "shape": {"M": "<=64"}}
    assert flat_match(match) == {
        "shape.M": ">=1",
        "all_of": [{"role": "a"}, {"shape.M": "<=64"}],
    }


def test_words_that_look_like_other_types_stay_strings():
    text = to_yaml({"a": "1", "b": "null", "c": "true", "d": None, "e": "on"})
    assert text == "a: '1'\nb: 'null'\nc: 'true'\nd: null\ne: on\n"


def test_long_words_stay_on_one_line():
    pattern = r"\.".join(["layers"] * 40)
    assert to_yaml({"regex": pattern}) == f"regex: {pattern}\n"


def test_policies_that_decide_the_same_have_no_difference(phyai, policy_file, tmp_path):
    shown = tmp_path / "shown.yaml"
    shown.write_text(phyai("policy", "show", policy_file).out)
    result = phyai("policy", "diff", policy_file, shown)
    assert (result.code, result.out) == (0, "Both decide the same.\n")
    assert phyai("policy", "diff", policy_file, shown, "--json").json["same"] is True


def test_differences_are_listed_and_are_the_exit_code(phyai, policy_file, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(
        POLICY.replace("priority: 10", "priority: 11").replace(
            "    - match: {name: lm_head}\n      scheme: null\n", ""
        )
    )
    result = phyai("policy", "diff", policy_file, other)
    assert result.code == 1
    assert result.out.splitlines() == [
        "rules 'expert-fa2' priority",
        "  - 10",
        "  + 11",
        "quantization",
        "  - name lm_head: unquantized",
    ]
    result = phyai("policy", "diff", policy_file, other, "--json")
    assert result.code == 1
    assert result.json["same"] is False
    assert result.json["changes"][0] == {
        "where": "rules 'expert-fa2' priority",
        "old": "10",
        "new": "11",
    }


def test_a_faulty_policy_cannot_be_compared(phyai, policy_file, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("ruels: []\n")
    result = phyai("policy", "diff", policy_file, bad)
    assert result.code == 1
    assert result.err.startswith(f"error: {bad}:1: ")


def test_the_schema_is_printed_or_written(phyai, tmp_path):
    printed = phyai("policy", "schema")
    assert printed.code == 0
    assert printed.json["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    written = tmp_path / "policy.schema.json"
    result = phyai("policy", "schema", "--output", written)
    assert (result.code, result.out) == (0, f"Wrote {written}\n")
    assert written.read_text() == printed.out
    assert phyai("policy", "schema", "--output", tmp_path / "gone" / "a.json").code == 1
