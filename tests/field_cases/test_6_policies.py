"""Kernel policies in YAML."""

import re

import pytest

from phyai.dispatch import PolicyError, build_catalog, load_policy, policy_from_mapping

RULES = "rules:\n  - id: first\n    match: {op: gemm, role: x}\n    restrict_to: torch.gemm.*\n"


@pytest.fixture(scope="module")
def catalog():
    return build_catalog()


@pytest.fixture
def refusal(tmp_path, catalog):
    """Loads a policy that must be refused; returns the line and the rest of the message."""

    def load(text):
        path = tmp_path / "policy.yaml"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(PolicyError) as caught:
            load_policy(path, catalog=catalog)
        found = re.match(rf"{re.escape(str(path))}:(\d+): (.*)", str(caught.value), re.DOTALL)
        assert found, f"no file and line: {caught.value}"
        return int(found[1]), found[2]

    return load


def test_case_97_a_key_written_twice_is_refused_with_both_lines(refusal):
    """A key that stands twice in one mapping is refused with both of its lines.

    Handled in phyai.dispatch.policy_yaml.
    """
    line, message = refusal(f"{RULES}    priority: 10\n    priority: 1\n")
    assert line == 6
    assert "duplicate key 'priority' (lines 5 and 6)" in message
    assert "'rules'" in refusal(f"{RULES}{RULES}")[1]


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "On", "NO"])
def test_case_98_words_like_off_and_no_stay_text(tmp_path, catalog, refusal, word):
    """Words such as off and no stay text, as keys and as values.

    Handled in phyai.dispatch.policy_yaml, phyai.dispatch.policy_load.
    """
    path = tmp_path / "named.yaml"
    path.write_text(f"rules:\n  - match: {{model.family: {word}}}\n    prefer: torch.rmsnorm\n")
    match = load_policy(path, catalog=catalog).rules[0].match.render()
    assert f"model.family == '{word.lower()}'" in match  # names of models have no case
    line, message = refusal(f"\nprofile: {word}\n")
    assert line == 2
    assert f"'{word}'" in message
    assert f"unknown key '{word}'" in refusal(f"{word}: 1\n")[1]


@pytest.mark.parametrize("word", ["true", "False"])
def test_case_98_a_truth_value_where_text_belongs_asks_for_quotes(refusal, word):
    """A truth value where text belongs is refused with the advice to quote it.

    Handled in phyai.dispatch.policy_yaml, phyai.dispatch.matcher.
    """
    line, message = refusal(
        f"rules:\n  - match:\n      model.family: {word}\n    prefer: torch.rmsnorm\n"
    )
    assert line == 3
    assert "quote" in message
    assert "quote" in refusal(f"profile: static\n{word}: 1\n")[1]


@pytest.mark.parametrize(
    "value",
    ["=", "[" * 2000, "2026-01-01", "2026-01-01T10:00:00Z", ".nan", "!!python/name:os.system x"],
    ids=["equals", "nesting", "date", "time", "nan", "tag"],
)
@pytest.mark.parametrize("key", ["profile", "unknown"])
def test_case_100_odd_yaml_values_are_errors_with_file_and_line(refusal, key, value):
    """An equals sign, deep nesting, dates and tags are policy errors with file and line.

    Handled in phyai.dispatch.policy_yaml.
    """
    assert refusal(f"# comment\n{key}: {value}\n")[0] == 2
    # Where any text is allowed.
    line, _ = refusal(f"rules:\n  - match:\n      role: {value}\n    prefer: torch.rmsnorm\n")
    assert line == 3


def test_case_101_ambiguous_rules_name_each_other(tmp_path, refusal, catalog):
    """Two rules of one priority that match the same call and disagree are refused by their ids.

    Handled in phyai.dispatch.policy_overlap.
    """
    other = "  - id: second\n    match: {op: gemm, shape.M: '<8'}\n    restrict_to: '*.gemm.*'\n"
    line, message = refusal(RULES + other)
    assert line == 5
    assert "'second' and 'first' (line 2) have the same priority 0" in message
    path = tmp_path / "ordered.yaml"
    path.write_text(f"{RULES}{other}    priority: 1\n", encoding="utf-8")
    assert len(load_policy(path, catalog=catalog).rules) == 2
    agreeing = {"match": {"op": "gemm", "shape.M": "<8"}, "restrict_to": "torch.gemm.*"}
    first = {"match": {"op": "gemm", "role": "x"}, "restrict_to": "torch.gemm.*"}
    assert len(policy_from_mapping({"rules": [first, agreeing]}, catalog=catalog).rules) == 2
