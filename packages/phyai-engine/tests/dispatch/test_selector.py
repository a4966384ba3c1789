import json

import pytest

from phyai.dispatch import (
    KernelQuery,
    ModelContext,
    NoKernelError,
    PolicyError,
    Selector,
    UnknownOperationError,
    policy_from_mapping,
)
from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import eq, is_set
from phyai.dispatch.opspec import Impl, OpSpec

BF16 = {"dtype": {"input": "bf16"}}
FP32 = {"dtype": {"input": "fp32"}}
WEIGHT = {"quant": {"format": "bf16"}}


def query(**facts):
    return KernelQuery.build("toy", **{**BF16, **facts})


def selector(catalog, policy=None, **options):
    parsed = policy_from_mapping(policy, catalog=catalog)
    return Selector(catalog, parsed, device=options.pop("device", "cpu"), **options)


def choose(catalog, policy=None, **facts):
    return selector(catalog, policy).select(query(**facts)).kernel_id


def test_priority_decides_and_only_the_winner_is_prepared(toy, recorder):
    assert choose(toy) == "fast.toy"
    assert recorder.prepared == [("fast.toy", {})]
    assert choose(toy, **FP32) == "mid.toy"
    assert choose(toy, **FP32, **WEIGHT) == "slow.toy"


def test_call_site_hints_come_first_unless_a_rule_matches(toy):
    plain = selector(toy)
    assert plain.select(query(), ("slow.toy", "absent.toy")).kernel_id == "slow.toy"
    ruled = selector(toy, {"rules": [{"prefer": "mid.toy"}]})
    assert ruled.select(query(), ("slow.toy",)).kernel_id == "mid.toy"


def test_rule_is_an_allow_list_in_written_order(toy):
    assert choose(toy, {"rules": [{"prefer": ["slow.toy", "fast.toy"]}]}) == "slow.toy"
    assert choose(toy, {"rules": [{"restrict_to": "mid.*"}]}) == "mid.toy"


def test_restrict_to_keeps_catalog_priority(toy):
    assert choose(toy, {"rules": [{"restrict_to": "*.toy"}]}) == "fast.toy"
    assert choose(toy, {"rules": [{"restrict_to": "?[li]*.toy"}]}) == "mid.toy"


def test_unnamed_optimized_row_never_replaces_a_named_one(toy):
    # mid.toy is not eligible with a weight format; fast.toy is, but only references stand in.
    assert choose(toy, {"rules": [{"prefer": "mid.toy"}]}, **WEIGHT) == "slow.toy"


@pytest.mark.parametrize(
    ("defaults", "rule", "expected"),
    [
        (None, None, "slow.toy"),
        ("reference", None, "slow.toy"),
        ("error", None, None),
        ("error", "reference", "slow.toy"),
        ("reference", "error", None),
    ],
)
def test_fallback_of_policy_and_rule(toy, defaults, rule, expected):
    policy = {"rules": [{"prefer": "mid.toy"}]}
    if defaults:
        policy["defaults"] = {"fallback": defaults}
    if rule:
        policy["rules"][0]["fallback"] = rule
    if expected:
        assert choose(toy, policy, **WEIGHT) == expected
        return
    with pytest.raises(NoKernelError, match=r"rule 'rule-0' \(mid\.toy\); fallback: error"):
        choose(toy, policy, **WEIGHT)


def test_fallback_error_excludes_references_when_no_rule_matches(toy):
    policy = {"defaults": {"fallback": "error"}}
    assert choose(toy, policy) == "fast.toy"
    with pytest.raises(NoKernelError, match="reference rows are excluded by fallback: error"):
        choose(toy, policy, **FP32, **WEIGHT)


def test_fallback_error_keeps_operations_that_have_only_references(recorder):
    catalog = Catalog()
    catalog.register_op(OpSpec(name="only", dtypes=("input",)))
    catalog.register(
        Impl(
            kernel_id="torch.only",
            op="only",
            when=is_set("dtype.input"),
            prepare=recorder("torch.only"),
            priority=0,
            reference=True,
        )
    )
    chosen = selector(catalog, {"defaults": {"fallback": "error"}}).select(
        KernelQuery.build("only", **FP32)
    )
    assert chosen.kernel_id == "torch.only"


def test_override_is_strict(toy):
    with pytest.raises(NoKernelError, match=r"override 'override-0' \(mid\.toy\)"):
        choose(toy, {"overrides": [{"use": "mid.toy"}]}, **WEIGHT)
    assert choose(toy, {"overrides": [{"use": "slow.toy"}]}) == "slow.toy"


def test_override_glob_takes_the_best_eligible_row(toy):
    glob = {"overrides": [{"restrict_to": "[ms]*.toy"}]}
    assert choose(toy, glob) == "mid.toy"
    assert choose(toy, glob, **WEIGHT) == "slow.toy"


def test_override_outranks_rules(toy):
    policy = {
        "rules": [{"prefer": "fast.toy", "priority": 99}],
        "overrides": [{"use": "slow.toy"}],
    }
    chosen = selector(toy, policy).select(query())
    assert chosen.kernel_id == "slow.toy"
    assert chosen.trace.matched_rules == ("override-0",)


def test_capture_excludes_rows_that_are_not_capture_safe(toy):
    assert choose(toy, mode="capture") == "mid.toy"
    assert choose(toy, mode="replay") == "mid.toy"
    with pytest.raises(NoKernelError, match=r"not capture-safe \(mode capture\)"):
        choose(toy, {"overrides": [{"use": "fast.toy"}]}, mode="capture")


def test_failing_prepare_falls_through(make):
    catalog = make(fast_toy=ImportError("no driver"))
    selection = selector(catalog).select(query())
    assert selection.kernel_id == "mid.toy"
    row = selection.trace.candidates[0]
    assert (row.prepared, row.prepare_error) == (False, "ImportError: no driver")
    assert "prepare failed: ImportError: no driver" in selection.trace.text


def test_failing_prepare_of_an_override_is_final(make):
    catalog = make(fast_toy=ImportError("no driver"))
    with pytest.raises(NoKernelError, match="failed to prepare"):
        choose(catalog, {"overrides": [{"use": "fast.toy"}]})
    assert choose(catalog, {"overrides": [{"restrict_to": "*.toy"}]}) == "mid.toy"


def test_policy_error_of_prepare_is_not_a_fallback(make):
    with pytest.raises(PolicyError, match="bad size"):
        choose(make(fast_toy=PolicyError("bad size")))


def test_everything_failing_lists_everything(make):
    broken = make(fast_toy=OSError("a"), mid_toy=OSError("b"), slow_toy=OSError("c"))
    with pytest.raises(NoKernelError) as caught:
        choose(broken)
    for text in ("OSError: a", "OSError: b", "OSError: c", "failed to prepare"):
        assert text in str(caught.value)


def test_params_reach_only_named_rows(toy, recorder):
    policy = {"rules": [{"prefer": ["fast.toy"], "params": {"size": 3}}]}
    assert selector(toy, policy).select(query()).params == {"size": 3}
    assert choose(toy, policy, **FP32) == "slow.toy"
    assert recorder.prepared == [("fast.toy", {"size": 3}), ("slow.toy", {})]


def test_bad_params_that_only_show_at_selection_are_policy_errors(toy, add_row):
    def check(params):
        raise ValueError(f"size {params['size']} is too big")

    add_row("check.toy", accepts=("size",), check_params=check)
    with pytest.raises(PolicyError, match=r"kernel 'check\.toy': size 3 is too big"):
        policy_from_mapping(
            {"rules": [{"prefer": "check.toy", "params": {"size": 3}}]}, catalog=toy
        )


def test_explicit_device_is_never_replaced(toy, add_row):
    add_row("gpu.toy", eq("device.vendor", "nvidia"))
    chooser = selector(toy, device="nvidia:sm90")
    assert chooser.select(query()).kernel_id == "gpu.toy"
    assert chooser.select(query(device="cpu")).kernel_id == "fast.toy"


def test_model_of_the_selector_fills_queries(toy):
    policy = {"rules": [{"match": {"model.family": "pi05"}, "prefer": "slow.toy"}]}
    chooser = selector(toy, policy, model=ModelContext("PI05"))
    assert chooser.select(query()).kernel_id == "slow.toy"
    assert chooser.select(query(model=ModelContext("other"))).kernel_id == "fast.toy"


def test_choices_are_cached_until_something_changes(toy, add_row):
    chooser = selector(toy)
    first = chooser.select(query())
    assert chooser.select(query()) is first
    epoch = chooser.epoch
    chooser.policy = policy_from_mapping({"rules": [{"prefer": "mid.toy"}]}, catalog=toy)
    assert chooser.epoch > epoch
    assert chooser.select(query()).kernel_id == "mid.toy"
    chooser.policy = policy_from_mapping({}, catalog=toy)
    add_row()
    assert chooser.select(query()).kernel_id == "new.toy"
    chooser.device = "nvidia:sm90"
    assert chooser.select(query()).trace.facts["device.arch"] == "sm90"
    chooser.model = ModelContext("x")
    assert chooser.select(query()).trace.facts["model.family"] == "x"


def test_selection_executes(toy):
    selection = selector(toy).select(query())
    assert selection.execute() == selection(1, 2) == "fast.toy"


def test_unknown_operation(toy):
    with pytest.raises(UnknownOperationError, match="did you mean 'toy'"):
        selector(toy).select(KernelQuery.build("toi"))


def test_trace_lists_every_row_with_its_reason(toy):
    trace = selector(toy, {"rules": [{"id": "r", "prefer": "slow.toy"}]}).explain(
        query(**FP32, shape={"M": 3}, attrs={"flag": "off"}, **WEIGHT)
    )
    rows = {row.kernel_id: row for row in trace.candidates}
    assert list(rows) == ["fast.toy", "mid.toy", "slow.toy"]
    assert rows["fast.toy"].reason == "dtype.input == 'bf16': is 'fp32'"
    assert rows["mid.toy"].reason == "quant.format is none: is 'bf16'"
    assert rows["slow.toy"].eligible
    assert (trace.selected, trace.matched_rules) == ("slow.toy", ("r",))
    assert trace.facts["attrs.flag"] is False
    assert trace.facts["mode"] == "eager"
    lines = trace.text.splitlines()
    assert lines[0] == "toy role=- selected=slow.toy"
    assert lines[1] == "  policy rules: r"
    assert lines[2].startswith("  no fast.toy: ")
    assert "rejected: dtype.input == 'bf16': is 'fp32'" in lines[3]
    again = json.loads(trace.to_json())
    assert again == json.loads(json.dumps(trace.as_dict()))
    assert again["candidates"][0]["kernel_id"] == "fast.toy"


def test_explain_prepares_nothing_and_never_raises_for_lack_of_rows(toy, recorder):
    chooser = selector(toy, {"overrides": [{"use": "mid.toy"}]})
    trace = chooser.explain(query(**WEIGHT))
    assert trace.selected is None
    assert recorder.prepared == []
    excluded = {row.kernel_id: row.excluded for row in trace.candidates}
    assert excluded["fast.toy"] == "not named by 'override-0'"
