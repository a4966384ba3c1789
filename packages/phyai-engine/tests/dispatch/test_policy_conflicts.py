"""Rules of one priority: refused at load when a call is known that both match."""

import pytest

from phyai.dispatch import PolicyError, policy_from_mapping
from phyai.dispatch.facts import Facts


def parse(data, catalog):
    return policy_from_mapping(data, catalog=catalog)


def test_rules_that_always_collide_are_refused_at_load(load):
    with pytest.raises(PolicyError) as caught:
        load("""
            rules:
              - {id: wide, match: {op: gemm}, restrict_to: torch.gemm.*}
              - {id: narrow, match: {op: gemm, role: x}, restrict_to: humming.gemm.*}
            """)
    assert "'narrow' and 'wide' (line 2) have the same priority 0 and one always" in str(
        caught.value
    )
    assert ":3: rules[1]" in str(caught.value)


OVERLAPPING = {
    "numbers": ({"op": "gemm", "shape.M": "<8"}, {"op": "gemm", "role": "x"}),
    "ranges": ({"op": "gemm", "shape.M": ">4"}, {"op": "gemm", "shape.M": "<=5"}),
    "multiples": (
        {"op": "gemm", "shape.K": "%48"},
        {"all_of": [{"shape.K": "%32"}, {"shape.K": ">100"}]},
    ),
    "absent": ({"op": "gemm", "quant.layout": None}, {"op": "gemm", "role": "x"}),
    "architecture": ({"op": "gemm", "device.arch": ">=sm80"}, {"device.vendor": "nvidia"}),
    "alternatives": ({"any_of": [{"role": "x"}, {"role": "y"}]}, {"role": ["y", "z"]}),
    "excluded": ({"op": "gemm", "none_of": [{"role": "x"}]}, {"op": "gemm", "shape.M": 1}),
    "implied": (
        {"op": "gemm", "when": {"if": {"shape.M": 1}, "then": {"role": "x"}}},
        {"op": "gemm", "shape.M": 1},
    ),
    "tags": ({"model.tags": "a"}, {"model.tags": "b"}),
    "library": ({"op": "gemm", "lib.humming": True}, {"op": "gemm", "role": "x"}),
    "formats": (
        {"op": "gemm", "quant.layout": "humming"},
        {"op": "gemm", "none_of": [{"quant.format": "int4"}]},
    ),
}
SEPARATE = {
    "operations": ({"op": "gemm", "role": "x"}, {"op": "rmsnorm", "role": "x"}),
    "numbers": ({"op": "gemm", "shape.M": "<8"}, {"op": "gemm", "shape.M": ">=8"}),
    "multiples": ({"op": "gemm", "shape.K": "%16"}, {"op": "gemm", "shape.K": "%16==1"}),
    "architectures": ({"device.arch": "sm90"}, {"device.arch": ">=sm100"}),
    "device": ({"device.arch": ">=sm80"}, {"device.vendor": "amd"}),
    "lists": ({"role": ["x", "y"]}, {"role": "z"}),
    "excluded": ({"op": "gemm", "role": "x"}, {"op": "gemm", "none_of": [{"role": ["x", "y"]}]}),
    "absent": ({"op": "gemm", "quant.layout": None}, {"op": "gemm", "quant.layout": "humming"}),
    "no such weight": (
        {"op": "gemm", "quant.format": "int4"},
        {"op": "gemm", "quant.layout": "convrot"},
    ),
    "flags": ({"attrs.causal": True, "op": "attention"}, {"attrs.causal": "no"}),
}


def two_rules(first, second):
    return {
        "rules": [
            {"id": "a", "match": first, "restrict_to": "*"},
            {"id": "b", "match": second, "restrict_to": "torch.*"},
        ]
    }


@pytest.mark.parametrize("name", OVERLAPPING)
def test_rules_that_provably_overlap_are_refused_at_load(catalog, name):
    data = two_rules(*OVERLAPPING[name])
    with pytest.raises(PolicyError) as caught:
        parse(data, catalog)
    assert "'b' and 'a' have the same priority 0 and both match the call with op" in str(
        caught.value
    )
    data["rules"][1]["priority"] = 1
    parse(data, catalog)
    data["rules"][1] |= {"priority": 0, "restrict_to": "*"}
    parse(data, catalog)


@pytest.mark.parametrize("name", SEPARATE)
def test_rules_that_a_fact_separates_are_accepted(catalog, name):
    parse(two_rules(*SEPARATE[name]), catalog)


def test_the_overlap_error_shows_a_call_that_both_match(load):
    with pytest.raises(PolicyError) as caught:
        load("""
            rules:
              - {id: small, match: {op: gemm, shape.M: "<8"}, prefer: torch.gemm.bf16}
              - id: role
                match: {op: gemm, role: x}
                restrict_to: "*.gemm.*"
            """)
    assert str(caught.value).endswith(
        "policy.yaml:3: rules[1]: 'role' and 'small' (line 2) have the same priority 0 and both "
        "match the call with op 'gemm', role 'x', shape.M 1; give them different priorities or "
        "narrow their match"
    )


def test_a_hostile_condition_is_compared_in_bounded_time(catalog):
    wide = [{"any_of": [{"shape.M": i * 20 + j} for j in range(20)]} for i in range(12)]
    never = {"none_of": [{}]}
    data = two_rules({"op": "gemm", "all_of": [*wide, never]}, {"op": "gemm", "role": "x"})
    data["rules"] += [dict(rule, id=f"{rule['id']}2", priority=1) for rule in data["rules"]]
    parse(data, catalog)


def test_rules_that_collide_over_an_omitted_fact_are_refused_when_they_do(toy):
    policy = parse(
        {
            "rules": [
                {"id": "a", "match": {"op": "toy", "attrs.window": 1}, "prefer": "mid.toy"},
                {"id": "b", "match": {"op": "toy", "attrs.window": 2}, "prefer": "slow.toy"},
            ]
        },
        toy,
    )
    entry = toy.entry("toy")

    def decide(**facts):
        values = Facts({"op": "toy", **facts}, kinds=entry.kinds, optional=entry.optional)
        return policy.decide(values, toy)

    assert decide(**{"attrs.window": 2}).matched_rules == ("b",)
    with pytest.raises(PolicyError, match=r"conflicting rules 'a', 'b' .* priority 0"):
        decide()


def test_rules_that_decide_the_same_do_not_collide(catalog):
    rule = {"prefer": "torch.gemm.bf16"}
    policy = parse(
        {
            "rules": [
                {"id": "small", "match": {"op": "gemm", "shape.M": "<8"}, **rule},
                {"id": "role", "match": {"op": "gemm", "role": "x"}, **rule},
            ]
        },
        catalog,
    )
    both = policy.decide(Facts({"op": "gemm", "role": "x", "shape.M": 4}), catalog)
    assert both.matched_rules == ("small", "role")
    assert both.candidates == ("torch.gemm.bf16",)
