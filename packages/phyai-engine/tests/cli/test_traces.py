"""Merging call sites and naming what was rejected."""

from phyai.cli.traces import group_lines, group_traces


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


def trace(op="gemm", role="mlp", selected="torch.gemm", rules=(), candidates=None, **facts):
    dotted = {name.replace("__", "."): value for name, value in facts.items()}
    return {
        "op": op,
        "role": role,
        "facts": {"op": op, "role": role, "device.vendor": "cpu", "model.family": "pi05", **dotted},
        "policy_profile": "static",
        "matched_rules": rules,
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
