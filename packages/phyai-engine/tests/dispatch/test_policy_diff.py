"""Differences of policies: what they decide, not how they are written."""

import pytest

from phyai.dispatch import Policy, policy_from_mapping
from phyai.dispatch.policy_diff import Change, diff_policies

EXPERT = {
    "id": "expert",
    "match": {"op": "attention_paged", "role": "expert", "device": {"arch": "SM90"}},
    "restrict_to": "flashinfer.attention_paged.fa2",
}
SMALL = {"id": "small", "match": {"op": "gemm", "shape.M": "<8"}, "prefer": "torch.gemm.bf16"}
MLP = {"match": {"glob": "*.mlp.*"}, "weight": {"dtype": "int4", "block_shape": [1, 128]}}
HEAD = {"match": {"name": "lm_head"}, "scheme": None}


def parse(data, catalog):
    return policy_from_mapping(data, catalog=catalog)


def compare(old, new, catalog):
    return diff_policies(parse(old, catalog), parse(new, catalog), catalog)


SAME = {
    "defaults": ({}, {"schema": 1, "profile": "static", "defaults": {"fallback": "reference"}}),
    "order of rules": ({"rules": [EXPERT, SMALL]}, {"rules": [SMALL, EXPERT]}),
    "nesting, case and order of facts": (
        {"rules": [EXPERT]},
        {
            "rules": [
                {
                    "id": "Expert",
                    "prefer": ["FlashInfer.attention_paged.FA2"],
                    "match": {"device.arch": "sm90", "role": ["expert"], "op": "attention_paged"},
                }
            ]
        },
    ),
    "names of rules": ({"rules": [SMALL]}, {"rules": [{**SMALL, "id": "tiny"}]}),
    "nested combinations": (
        {"rules": [{**SMALL, "match": {"op": "gemm", "any_of": [{"role": "a"}, {"role": "b"}]}}]},
        {
            "rules": [
                {
                    **SMALL,
                    "match": {
                        "all_of": [{"any_of": [{"any_of": [{"role": "b"}, {"role": "a"}]}]}],
                        "op": "gemm",
                    },
                }
            ]
        },
    ),
    "double negation": (
        {"rules": [{**SMALL, "match": {"op": "gemm", "none_of": [{"none_of": [{"role": "a"}]}]}}]},
        {"rules": [{**SMALL, "match": {"role": "a", "op": "gemm"}}]},
    ),
    "block of a group": (
        {"quantization": {"rules": [MLP]}},
        {
            "quantization": {
                "default": None,
                "rules": [
                    {
                        "match": {"glob": "*.mlp.*"},
                        "input": None,
                        "weight": {
                            "dtype": "int4",
                            "granularity": "block",
                            "block_shape": [1, 128],
                            "symmetric": True,
                        },
                    }
                ],
            }
        },
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_spelling_makes_no_difference(catalog, name):
    old, new = SAME[name]
    assert compare(old, new, catalog) == []
    assert compare(new, old, catalog) == []


DIFFERENT = {
    "profile": ({}, {"profile": "autotune"}, [Change("profile", "static", "autotune")]),
    "fallback": (
        {},
        {"defaults": {"fallback": "error"}},
        [Change("fallback", "reference", "error")],
    ),
    "priority": (
        {"rules": [SMALL]},
        {"rules": [{**SMALL, "priority": 3}]},
        [Change("rules 'small' priority", "0", "3")],
    ),
    "condition": (
        {"rules": [SMALL]},
        {"rules": [{**SMALL, "match": {"op": "gemm", "shape.M": "<=8"}}]},
        [
            Change(
                "rules 'small' match",
                "op == 'gemm' and shape.M < 8",
                "op == 'gemm' and shape.M <= 8",
            )
        ],
    ),
    "rows and their order": (
        {"rules": [{**SMALL, "prefer": ["torch.gemm.bf16", "flashinfer.gemm.bf16"]}]},
        {"rules": [{**SMALL, "prefer": ["flashinfer.gemm.bf16", "torch.gemm.bf16"]}]},
        [
            Change(
                "rules 'small' rows",
                "torch.gemm.bf16, flashinfer.gemm.bf16",
                "flashinfer.gemm.bf16, torch.gemm.bf16",
            )
        ],
    ),
    "params": (
        {"rules": [{"prefer": "flashinfer.attention_paged"}]},
        {"rules": [{"prefer": "flashinfer.attention_paged", "params": {"prefill_backend": "fa2"}}]},
        [Change("rules 'rule-0' params", None, "prefill_backend: 'fa2'")],
    ),
    "rule fallback": (
        {"rules": [SMALL]},
        {"rules": [{**SMALL, "fallback": "error"}]},
        [Change("rules 'small' fallback", None, "error")],
    ),
    "added rule": (
        {},
        {"overrides": [{"id": "pin", "use": "torch.rmsnorm"}]},
        [Change("overrides 'pin'", None, "priority 0; match op == 'rmsnorm'; rows torch.rmsnorm")],
    ),
    "quantized layers": (
        {"quantization": {"rules": [MLP]}},
        {"quantization": {"rules": [HEAD, MLP]}},
        [Change("quantization", None, "name lm_head: unquantized")],
    ),
    "no quantization": (
        {"quantization": {"rules": [HEAD]}},
        {},
        [
            Change("quantization", "name lm_head: unquantized", None),
            Change("quantization", "default: unquantized", None),
        ],
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_decisions_make_a_difference(catalog, name):
    old, new, expected = DIFFERENT[name]
    assert compare(old, new, catalog) == expected
    assert compare(new, old, catalog) == [
        Change(change.where, change.new, change.old) for change in expected
    ]


def test_the_order_of_quantization_rules_matters(catalog):
    wide = {"match": {"glob": "*"}, "scheme": None}
    changes = compare(
        {"quantization": {"rules": [MLP, wide]}}, {"quantization": {"rules": [wide, MLP]}}, catalog
    )
    assert {change.where for change in changes} == {"quantization"}


def test_equal_versions_never_differ(catalog):
    policy = parse({"rules": [EXPERT, SMALL], "quantization": {"rules": [MLP, HEAD]}}, catalog)
    assert diff_policies(policy, policy, catalog) == []
    assert diff_policies(Policy(), policy, catalog) != []
