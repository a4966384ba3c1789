"""Merging call sites and naming what was rejected."""

import pytest

from phyai.cli.names import compact_names
from phyai.cli.traces import group_lines
from phyai.cli.traces import group_traces as group_named


def group_traces(traces):
    return group_named(("", trace) for trace in traces)


def rule(name="a", *, matched=True, decides=False, reason=""):
    return {
        "id": name,
        "kind": "rule",
        "priority": 0,
        "matched": matched,
        "decides": decides,
        "reason": reason,
        "line": 1,
    }


def candidate(kernel_id, reason="", excluded="", prepare_error=""):
    return {
        "kernel_id": kernel_id,
        "eligible": not reason,
        "when": "always",
        "reason": reason,
        "excluded": excluded,
        "skipped": (),
        "prepared": False,
        "prepare_error": prepare_error,
        "benchmark_ms": None,
    }


def trace(
    op="gemm", role="mlp", selected="torch.gemm", rules=(), candidates=None, verdicts=(), **facts
):
    dotted = {name.replace("__", "."): value for name, value in facts.items()}
    return {
        "op": op,
        "role": role,
        "facts": {"op": op, "role": role, "device.vendor": "cpu", "model.family": "pi05", **dotted},
        "policy_profile": "static",
        "matched_rules": rules,
        "rules": verdicts,
        "candidates": candidates or [candidate("torch.gemm")],
        "selected": selected,
        "autotuned": False,
    }


def test_sites_that_differ_in_shape_or_layer_merge():
    traces = [
        trace(shape__M=50, attrs__layer_id=0),
        trace(shape__M=968, attrs__layer_id=1),
        trace(shape__M=50, attrs__layer_id=2),
    ]
    (group,) = group_traces(traces)
    assert group.count == 3
    assert group.shapes == {"M=50": 2, "M=968": 1}
    lines = group_lines(group)
    assert lines[0] == "gemm  role mlp  ->  torch.gemm  (3 sites)"
    assert "  shape     2 x M=50" in lines
    assert "  shape     1 x M=968" in lines
    assert "layer_id" not in "\n".join(lines)


def test_any_other_difference_keeps_sites_apart():
    first = trace(dtype__input="fp32")
    others = [
        trace(dtype__input="bf16"),
        trace(dtype__input="fp32", op="rmsnorm"),
        trace(dtype__input="fp32", role="head"),
        trace(dtype__input="fp32", selected=None),
        trace(dtype__input="fp32", rules=("a",)),
        trace(dtype__input="fp32", verdicts=(rule(reason="role == 'x': is ''"),)),
        {**trace(dtype__input="fp32"), "problem": "cannot be stored"},
        trace(dtype__input="fp32", candidates=[candidate("torch.gemm", reason="too small")]),
        trace(dtype__input="fp32", candidates=[candidate("torch.gemm", excluded="rule a")]),
    ]
    for other in others:
        assert len(group_traces([first, other])) == 2


def test_groups_keep_the_order_of_their_first_site():
    order = [trace(op="b"), trace(op="a"), trace(op="b"), trace(op="c")]
    assert [group.trace["op"] for group in group_traces(order)] == ["b", "a", "c"]
    assert group_traces([]) == []


def test_every_candidate_has_one_line_with_its_reason():
    candidates = [
        candidate("flash.gemm", reason="device.vendor is cpu, needs nvidia"),
        candidate("fast.gemm", prepare_error="no compiler"),
        candidate("torch.gemm"),
        candidate("slow.gemm", excluded="rule 'a' names other kernels"),
        candidate("eager.gemm"),
    ]
    (group,) = group_traces([trace(candidates=candidates, rules=("a", "b"), shape__M=1)])
    assert group_lines(group) == [
        "gemm  role mlp  ->  torch.gemm",
        "  shape     M=1",
        "  rules     a, b",
        "  rejected  flash.gemm  device.vendor is cpu, needs nvidia",
        "  rejected  fast.gemm   prepare failed: no compiler",
        "  chosen    torch.gemm",
        "  excluded  slow.gemm   rule 'a' names other kernels",
        "  possible  eager.gemm",
    ]


def test_no_kernel_and_no_rule_are_said():
    rejected = [candidate("torch.gemm", reason="no")]
    (group,) = group_traces([trace(selected=None, role="", candidates=rejected)])
    lines = group_lines(group)
    assert lines[0] == "gemm  ->  NO KERNEL"
    assert "  rules     none matched" in lines


def test_the_json_form_counts_and_lists_shapes():
    (group,) = group_traces([trace(shape__M=2, dtype__input="bf16", attrs__layer_id=4)] * 2)
    document = group.as_dict()
    assert document["count"] == 2
    assert document["shapes"] == [{"shape": "M=2", "count": 2}]
    assert document["facts"]["dtype.input"] == "bf16"
    assert not {"shape.M", "attrs.layer_id"} & set(document["facts"])
    assert document["candidates"][0]["kernel_id"] == "torch.gemm"


def test_modules_are_listed_in_few_words():
    named = [(f"layers.{index}.mlp", trace()) for index in (0, 1, 2, 4)] + [("head", trace())]
    (group,) = group_named([*named, ("", trace())])
    lines = group_lines(group)
    assert lines[1:3] == ["  module    layers.[0-2,4].mlp", "  module    head"]
    assert group.as_dict()["modules"][-1] == "head"
    assert group.count == 6


def test_rules_that_did_not_decide_say_why():
    verdicts = (
        rule("first", decides=True),
        rule("second", reason="rule 'first' goes before it (priority 2 over 1)"),
        rule("third", matched=False, reason="role == 'expert': is ''"),
    )
    (group,) = group_traces([trace(rules=("first",), verdicts=verdicts)])
    lines = group_lines(group)
    assert "  rules     first" in lines
    assert "  outranked second  rule 'first' goes before it (priority 2 over 1)" in lines
    assert "  unmatched third  role == 'expert': is ''" in lines


def test_a_weight_that_cannot_be_stored_is_the_problem_of_its_calls():
    asked = {**trace(selected=None, candidates=[candidate("x")]), "problem": "K is 32"}
    (group,) = group_traces([asked])
    assert group_lines(group)[0] == "gemm  role mlp  ->  NO KERNEL"
    assert "  problem   K is 32" in group_lines(group)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["head"], ["head"]),
        (["a.0", "a.0", "a.1"], ["a.[0-1]"]),
        (["a.3.b", "a.1.b", "c", "a.2.b", "a.7.b"], ["a.[1-3,7].b", "c"]),
        (["fc1", "fc2"], ["fc1", "fc2"]),
        (["x.0.y.1.z", "x.0.y.2.z", "x.1.y.1.z"], ["x.0.y.[1-2].z", "x.1.y.1.z"]),
        (["0.a", "1.a", "5"], ["[0-1].a", "5"]),
    ],
)
def test_names_that_differ_in_one_number_are_one(names, expected):
    assert compact_names(names) == expected


def test_measured_rows_say_their_time_and_others_why_they_have_none():
    rows = [candidate("fast"), candidate("slow"), candidate("shy")]
    rows[0]["benchmark_ms"], rows[1]["benchmark_ms"] = 0.0125, 0.5
    rows[2]["measure_error"] = "needs a live runner"
    (group,) = group_traces([trace(selected="fast", candidates=rows)])
    assert group_lines(group)[-3:] == [
        "  chosen    fast  measured 0.0125 ms",
        "  possible  slow  measured 0.5000 ms",
        "  possible  shy   not measured: needs a live runner",
    ]
