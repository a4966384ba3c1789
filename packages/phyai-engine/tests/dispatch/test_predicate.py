import itertools

import pytest

from phyai.dispatch.conditions import (
    at_least,
    compare,
    divisible,
    eq,
    family_in,
    has_any,
    is_none,
    is_set,
    lib,
    ne,
    one_of,
    same,
)
from phyai.dispatch.facts import MISSING, FactKind, Facts
from phyai.dispatch.outcome import Truth
from phyai.dispatch.predicate import (
    ALWAYS,
    Const,
    ParensError,
    all_of,
    any_of,
    implies,
    none_of,
)

FACTS = Facts(
    {
        "shape.M": 48,
        "dtype.input": "bfloat16",
        "device.arch": "SM90",
        "quant.layout": None,
        "model.tags": ["Fast", "robot"],
        "attrs.flag": True,
    },
    optional=("attrs.window",),
)


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        (eq("shape.M", 48), True),
        (eq("shape.M", 47), False),
        (ne("shape.M", 47), True),
        (ne("shape.M", None), True),
        (compare("shape.M", "<=", 48), True),
        (compare("shape.M", "<", 48), False),
        (compare("shape.M", ">", 47), True),
        (compare("shape.M", ">=", 49), False),
        (divisible("shape.M", 16), True),
        (divisible("shape.M", 16, 1), False),
        (eq("dtype.input", "bf16"), True),
        (one_of("dtype.input", "fp16", "bfloat16"), True),
        (one_of("dtype.input", "fp16", "fp32"), False),
        (at_least("sm80"), True),
        (at_least("sm100"), False),
        (family_in("sm9", "sm10"), True),
        (family_in("sm12"), False),
        (is_none("quant.layout"), True),
        (is_set("quant.layout"), False),
        (eq("quant.layout", "humming"), False),
        (ne("quant.layout", "humming"), True),
        (one_of("quant.layout", None, "humming"), True),
        (one_of("quant.layout", "humming"), False),
        (has_any("model.tags", "ROBOT", "x"), True),
        (has_any("model.tags", "slow"), False),
        (same("shape.M", "shape.M"), True),
        (eq("attrs.flag", "yes", FactKind.BOOL), True),
    ],
)
def test_leaves(predicate, expected):
    outcome = predicate.eval(FACTS)
    assert outcome.ok is expected
    assert bool(outcome.reason) is not expected
    inverse = (~predicate).eval(FACTS)
    assert inverse.ok is not expected


def test_unknown_value_is_never_ordered():
    facts = Facts({"device.arch": None, "shape.M": None})
    for predicate in (at_least("sm50"), family_in("sm9"), compare("shape.M", "<", 9)):
        assert not predicate.eval(facts).ok
        assert "is unknown" in predicate.eval(facts).reason


def test_reason_shows_condition_and_value():
    reason = eq("dtype.input", "fp32").eval(FACTS).reason
    assert reason == "dtype.input == 'fp32': is 'bf16'"
    missing = eq("shape.K", 4).eval(FACTS)
    assert missing.truth is Truth.ABSENT
    assert missing.reason == "shape.K == 4: shape.K was not provided"


def test_missing_optional_is_vacuous():
    outcome = eq("attrs.window", 4).eval(FACTS)
    assert outcome.ok
    assert outcome.skipped == ("attrs.window",)


def test_negation_keeps_missing_optional_accepting_and_missing_required_rejecting():
    assert none_of(eq("attrs.window", 4)).eval(FACTS).ok
    assert not none_of(eq("shape.K", 4)).eval(FACTS).ok


def test_combinators_follow_the_strength_of_the_four_values():
    true, false = eq("shape.M", 48), eq("shape.M", 1)
    vacuous, absent = eq("attrs.window", 1), eq("shape.K", 1)
    parts = {"T": true, "F": false, "V": vacuous, "A": absent}
    order_and, order_or = "FAVT", "TVAF"
    for left, right in itertools.product(parts, repeat=2):
        both = all_of(parts[left], parts[right]).eval(FACTS).truth.value[0].upper()
        either = any_of(parts[left], parts[right]).eval(FACTS).truth.value[0].upper()
        assert both == min(left, right, key=order_and.index)
        assert either == min(left, right, key=order_or.index)


def test_and_reports_the_first_failure_in_order():
    outcome = all_of(eq("shape.M", 48), eq("shape.M", 1), eq("shape.M", 2)).eval(FACTS)
    assert outcome.reason.startswith("shape.M == 1")


def test_or_reports_every_failure():
    reason = any_of(eq("shape.M", 1), eq("shape.M", 2)).eval(FACTS).reason
    assert "shape.M == 1" in reason
    assert "shape.M == 2" in reason


def test_implication():
    rule = implies(eq("dtype.input", "bf16"), eq("shape.M", 48))
    assert rule.eval(FACTS).ok
    assert not implies(eq("dtype.input", "bf16"), eq("shape.M", 1)).eval(FACTS).ok
    assert implies(eq("dtype.input", "fp16"), eq("shape.M", 1)).eval(FACTS).ok


def test_rendering_is_canonical_and_parenthesised():
    left = one_of("shape.M", 128, 64)
    assert left.render() == one_of("shape.M", 64, 128).render() == "shape.M in {64, 128}"
    nested = all_of(any_of(eq("shape.M", 1), eq("shape.M", 2)), eq("op", "gemm"))
    assert nested.render() == "(shape.M == 1 or shape.M == 2) and op == 'gemm'"
    assert ALWAYS.render() == "always"
    mixed = one_of("attrs.toy", "b", "", None, 2, 0, kind=FactKind.ANY)
    assert mixed.render() == "attrs.toy in {none, 0, 2, '', 'b'}"


def test_facts_used():
    predicate = all_of(eq("shape.M", 1), ~same("dtype.input", "dtype.output"), lib("nothing"))
    assert predicate.facts_used() == {"shape.M", "dtype.input", "dtype.output", "lib.nothing"}


def test_restrict_decides_what_is_known_and_keeps_the_rest():
    known = Facts({"dtype.input": "bf16"})
    rest = all_of(eq("dtype.input", "bf16"), compare("shape.M", "<", 9)).restrict(known)
    assert rest.render() == "shape.M < 9"
    never = all_of(compare("shape.M", "<", 9), eq("dtype.input", "fp16")).restrict(known)
    assert isinstance(never, Const)
    assert not never.value
    assert any_of(eq("dtype.input", "bf16"), eq("shape.M", 1)).restrict(known) == ALWAYS
    assert same("dtype.input", "dtype.output").restrict(known).render() == "dtype.output == 'bf16'"
    inverted = (~eq("dtype.input", "bf16")).restrict(known)
    assert isinstance(inverted, Const)
    assert not inverted.value


@pytest.mark.parametrize("use", [bool, lambda p: p and p, lambda p: not p])
def test_predicates_refuse_to_be_booleans(use):
    with pytest.raises(ParensError, match=r"shape\.M == 1"):
        use(eq("shape.M", 1))


def test_operators_combine():
    predicate = (eq("shape.M", 48) & ~eq("shape.M", 1)) | eq("shape.M", 2)
    assert predicate.eval(FACTS).ok


def test_library_reason_names_the_distribution():
    facts = Facts({}, libraries=("no_such_library",))
    reason = lib("no_such_library").eval(facts).reason
    assert "no_such_library is not installed" in reason


def test_library_is_looked_up_only_when_asked(monkeypatch):
    asked = []
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", asked.append)
    facts = Facts({"device.vendor": "cpu"}, libraries=("flashinfer",))
    assert not all_of(eq("device.vendor", "nvidia"), lib("flashinfer")).eval(facts).ok
    assert asked == []
    assert facts.get("lib.other") is MISSING


def test_unusable_fact_values_name_the_path():
    with pytest.raises(ValueError, match=r"fact 'shape.M' has an unusable value 'many'"):
        Facts({"shape.M": "many"})
    with pytest.raises(ValueError, match="no series"):
        Facts({"device.arch": "90"})


@pytest.mark.parametrize("word", ["0", "false", "No", "off", ""])
def test_boolean_words(word):
    assert Facts({"attrs.b": word}, kinds={"attrs.b": FactKind.BOOL})["attrs.b"] is False


def test_bad_builders():
    with pytest.raises(ValueError, match="out of range"):
        divisible("shape.M", 0)
    with pytest.raises(ValueError, match="unknown; allowed"):
        compare("shape.M", "=<", 1)
    with pytest.raises(ValueError, match="no order"):
        at_least("gfx942")
