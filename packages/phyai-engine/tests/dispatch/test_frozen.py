"""A frozen site never outlives what its choice was made under, and its key misses no fact."""

import gc
from dataclasses import replace

import pytest
import torch

from phyai.dispatch import (
    CallSite,
    FrozenChoiceError,
    ModelContext,
    Policy,
    Selector,
    freeze_kernel_choices,
    initialize_kernel_system,
    kernel_mode_scope,
    kernel_selector_scope,
    live_call_sites,
    policy_from_mapping,
    reset_kernel_selector,
    set_kernel_selector,
    unfreeze_kernel_choices,
)
from phyai.dispatch.call import reset_verify_frozen
from phyai.dispatch.conditions import compare, eq
from phyai.layers import Linear

CPU = torch.device("cpu")


def prefer(catalog, kernel_id):
    return policy_from_mapping({"rules": [{"prefer": kernel_id}]}, catalog=catalog)


def call(site, dtype=torch.bfloat16, **facts):
    return site.select(device=CPU, dtype={"input": dtype}, **facts)


def frozen_site():
    site = CallSite("toy")
    chosen = call(site)
    site.freeze()
    assert call(site) is chosen
    return site


def test_every_kind_of_change_thaws_at_the_next_call(toy, selector, add_row):
    changes = {
        "policy": (lambda: setattr(selector, "policy", prefer(toy, "mid.toy")), "mid.toy"),
        "same policy again": (lambda: setattr(selector, "policy", Policy()), "fast.toy"),
        "device": (lambda: setattr(selector, "device", "nvidia:sm90"), "fast.toy"),
        "model": (lambda: setattr(selector, "model", ModelContext("pi05")), "fast.toy"),
        "cache": (selector.clear_cache, "fast.toy"),
        "selector": (lambda: set_kernel_selector(Selector(toy, device="cpu")), "fast.toy"),
        "catalog": (add_row, "new.toy"),
    }
    for what, (change, expected) in changes.items():
        site = frozen_site()
        before = call(site)
        change()
        after = call(site)
        assert after is not before, what
        assert after.kernel_id == expected, what
        assert not site.frozen, what


def test_a_scope_is_a_change_in_both_directions(toy, selector):
    site = frozen_site()
    inner = Selector(toy, prefer(toy, "mid.toy"), device="cpu")
    with kernel_selector_scope(inner):
        assert call(site).kernel_id == "mid.toy"
        site.freeze()
        assert call(site).kernel_id == "mid.toy"
    assert call(site).kernel_id == "fast.toy"
    assert not site.frozen


def test_freezing_after_a_change_does_not_pin_the_old_choice(toy, selector):
    site = frozen_site()
    selector.policy = prefer(toy, "mid.toy")
    gc.collect()
    assert freeze_kernel_choices()["cold"] >= 1
    assert call(site).kernel_id == "mid.toy"
    unfreeze_kernel_choices()


def test_a_new_process_selector_replaces_frozen_choices_of_real_layers():
    initialize_kernel_system(device="cpu")
    layer = Linear(8, 4, prefix="a.b", params_dtype=torch.float32)
    layer.weight.data.normal_()
    x = torch.randn(3, 8)
    expected = layer(x)
    site = next(value for value in vars(layer).values() if isinstance(value, CallSite))
    site.freeze()
    first = site.select(device=x.device)
    reset_kernel_selector()
    torch.testing.assert_close(layer(x), expected)
    assert not site.frozen
    assert site.trace() is not first.trace


def test_a_frozen_choice_of_one_mode_serves_no_other(toy, selector):
    site = frozen_site()
    with kernel_mode_scope("capture"):
        assert call(site).kernel_id == "mid.toy"
    assert call(site).kernel_id == "fast.toy"


@pytest.mark.parametrize(
    ("when", "hit", "miss"),
    [
        (
            eq("quant.block_k", 128),
            {"quant": {"format": "int4", "block_shape": (1, 128)}},
            {"quant": {"format": "int4", "block_shape": (1, 64)}},
        ),
        (
            eq("quant.fields.activation", "int8"),
            {"quant": {"format": "int4", "fields": {"activation": "int8"}}},
            {"quant": {"format": "int4", "fields": {"activation": "a16"}}},
        ),
        (
            eq("quant.granularity", "block"),
            {"quant": {"format": "int4", "granularity": "block"}},
            {"quant": {"format": "int4", "granularity": "per_channel"}},
        ),
        (compare("shape.M", "<=", 8), {"dims": {"M": 8}}, {"dims": {"M": 9}}),
        (eq("attrs.flag", True), {"attrs": {"flag": True}}, {"attrs": {"flag": False}}),
    ],
    ids=["block_k", "fields", "granularity", "dims", "attrs"],
)
def test_what_a_row_reads_separates_the_choices_of_one_site(selector, add_row, when, hit, miss):
    add_row(when=when)
    site = CallSite("toy")
    for facts, expected in [(hit, True), (miss, False), (hit, True), (hit, True), (miss, False)]:
        assert (call(site, **facts).kernel_id == "new.toy") is expected


def test_mappings_that_a_caller_reuses_are_read_at_every_call(selector, add_row):
    add_row(when=compare("shape.M", "<=", 8))
    site, dims, dtype = CallSite("toy"), {"M": 8}, {"input": torch.bfloat16}
    for rows, name, expected in [
        (8, torch.bfloat16, "new.toy"),
        (8, torch.bfloat16, "new.toy"),
        (9, torch.bfloat16, "fast.toy"),
        (9, torch.float32, "mid.toy"),
        (8, torch.float32, "new.toy"),
    ]:
        dims["M"], dtype["input"] = rows, name
        assert site.select(device=CPU, dtype=dtype, dims=dims).kernel_id == expected


def test_all_choices_of_a_site_can_be_listed(toy, selector):
    site = CallSite("toy")
    assert site.traces() == []
    call(site)
    site.select(device=CPU, dtype={"input": torch.float32})
    call(site)
    assert [trace.selected for trace in site.traces()] == ["fast.toy", "mid.toy"]
    selector.policy = replace(selector.policy)
    call(site)
    assert [trace.selected for trace in site.traces()] == ["fast.toy"]


def test_freeze_ignores_other_facts_but_not_another_device(toy, selector):
    site = CallSite("toy")
    pinned = call(site)
    site.freeze()
    assert call(site, torch.float32) is pinned
    elsewhere = site.select(device="nvidia:sm90", dtype={"input": torch.float32})
    assert elsewhere.kernel_id == "mid.toy"
    site.unfreeze()
    assert call(site, torch.float32).kernel_id == "mid.toy"


def test_cold_and_polymorphic_sites_do_not_freeze(selector):
    site = CallSite("toy")
    with pytest.raises(FrozenChoiceError, match="no choice yet"):
        site.freeze()
    call(site)
    call(site, torch.float32)
    with pytest.raises(
        FrozenChoiceError, match=r"several choices in mode eager: fast\.toy, mid\.toy"
    ):
        site.freeze()


def test_two_keys_with_one_choice_freeze(toy, selector):
    selector.policy = policy_from_mapping(
        {"rules": [{"match": {"shape.M": 7}, "prefer": "fast.toy"}]}, catalog=toy
    )
    site = CallSite("toy")
    for rows in (7, 8):
        assert call(site, dims={"M": rows}).kernel_id == "fast.toy"
    site.freeze()
    assert site.frozen


def test_modes_are_frozen_separately(selector):
    site = CallSite("toy")
    eager = call(site)
    with kernel_mode_scope("capture"):
        captured = call(site)
    assert (eager.kernel_id, captured.kernel_id) == ("fast.toy", "mid.toy")
    site.freeze()
    assert call(site) is eager
    assert call(site, mode="graph-capturing") is captured
    assert call(site, torch.float32, mode="replay").kernel_id == "mid.toy"


def test_verify_frozen_raises_when_the_choice_would_differ(selector, monkeypatch):
    monkeypatch.setenv("PHYAI_KERNEL_VERIFY_FROZEN", "yes")
    reset_verify_frozen()
    site = CallSite("toy")
    call(site)
    site.freeze()
    call(site)
    with pytest.raises(FrozenChoiceError, match=r"frozen to 'fast\.toy'.* choose 'mid\.toy'"):
        call(site, torch.float32)


def test_freeze_all_counts(selector):
    gc.collect()
    for site in live_call_sites():
        site.unfreeze()
    baseline = freeze_kernel_choices()
    good, mixed, cold = CallSite("toy"), CallSite("toy"), CallSite("toy")
    call(good)
    call(mixed)
    call(mixed, torch.float32)
    counts = freeze_kernel_choices()
    delta = {name: counts[name] - baseline[name] for name in counts}
    assert delta == {"frozen": 1, "polymorphic": 1, "cold": 1}
    unfreeze_kernel_choices()
    assert not good.frozen
    assert cold.trace() is None
