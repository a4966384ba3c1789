import json

import pytest
import torch

from phyai.dispatch import (
    CallSite,
    KernelConfig,
    KernelQuery,
    Selector,
    initialize_kernel_system,
    policy_from_mapping,
    set_kernel_selector,
)

TIMES = {"fast.toy": 3.0, "mid.toy": 1.0, "slow.toy": 2.0}


class Hook:
    def __init__(self, times=TIMES):
        self.times, self.measured = times, []

    def __call__(self, impl, facts, selection):
        self.measured.append(impl.kernel_id)
        time = self.times[impl.kernel_id]
        if isinstance(time, Exception):
            raise time
        return time


def tuned(catalog, hook, policy=None, **options):
    parsed = policy_from_mapping({"profile": "autotune", **(policy or {})}, catalog=catalog)
    return Selector(catalog, parsed, device="cpu", benchmark=hook, **options)


def stored_times(path):
    return [entry["milliseconds"] for entry in json.loads(path.read_text())["workloads"].values()]


def query(**facts):
    return KernelQuery.build("toy", **{"dtype": "bf16", **facts})


def test_the_fastest_row_wins_and_the_trace_says_so(toy):
    selector = tuned(toy, Hook())
    selection = selector.select(query())
    assert selection.kernel_id == "mid.toy"
    assert selection.trace.autotuned
    times = {row.kernel_id: row.benchmark_ms for row in selection.trace.candidates}
    assert times == TIMES
    assert "measured: 1.0000 ms" in selection.trace.text
    assert selector.explain(query()).selected == "mid.toy"


def test_policy_narrows_what_is_measured(toy):
    hook = Hook()
    policy = {"rules": [{"prefer": ["fast.toy", "slow.toy"]}]}
    assert tuned(toy, hook, policy).select(query()).kernel_id == "slow.toy"
    assert hook.measured == ["fast.toy", "slow.toy"]
    strict = tuned(toy, hook, {"overrides": [{"restrict_to": "*.toy"}]})
    assert strict.select(query()).kernel_id == "fast.toy"
    assert len(hook.measured) == 2


def test_rows_that_cannot_be_measured_are_skipped(toy):
    hook = Hook({**TIMES, "mid.toy": RuntimeError("no inputs")})
    assert tuned(toy, hook).select(query()).kernel_id == "slow.toy"
    nothing = Hook(dict.fromkeys(TIMES, NotImplementedError()))
    selection = tuned(toy, nothing).select(query())
    assert selection.kernel_id == "fast.toy"
    assert not selection.trace.autotuned


def test_static_profile_and_missing_hook_do_not_measure(toy):
    assert tuned(toy, None).select(query()).kernel_id == "fast.toy"
    hook = Hook()
    static = Selector(toy, policy_from_mapping({}, catalog=toy), device="cpu", benchmark=hook)
    assert static.select(query()).kernel_id == "fast.toy"
    assert hook.measured == []


def test_winner_is_stored_and_reused_within_a_power_of_two_of_rows(toy, tmp_path):
    cache = tmp_path / "deep" / "winners.json"
    hook = Hook()
    tuned(toy, hook, autotune_cache=cache).select(query(shape={"M": 50}))
    assert stored_times(cache) == [TIMES]
    assert {path.name for path in cache.parent.iterdir()} <= {"winners.json", "winners.json.lock"}
    again = tuned(toy, hook, autotune_cache=cache)
    assert again.explain(query(shape={"M": 64})).selected == "mid.toy"
    assert again.select(query(shape={"M": 33})).kernel_id == "mid.toy"
    assert len(hook.measured) == 3
    again.select(query(shape={"M": 65}))
    assert len(hook.measured) == 6


def test_capture_takes_the_fastest_capture_safe_row_and_never_measures(toy):
    hook = Hook({"fast.toy": 0.1, "mid.toy": 2.0, "slow.toy": 1.0})
    selector = tuned(toy, hook)
    assert selector.select(query()).kernel_id == "fast.toy"
    assert len(hook.measured) == 3
    captured = selector.select(query(mode="capture"))
    assert captured.kernel_id == "slow.toy"
    assert captured.trace.autotuned
    assert selector.select(query(mode="replay")).kernel_id == "slow.toy"
    assert len(hook.measured) == 3


def test_capture_before_any_measurement_follows_priority_until_there_is_one(toy):
    hook = Hook({**TIMES, "slow.toy": 0.5})
    selector = tuned(toy, hook)
    set_kernel_selector(selector)
    site = CallSite("toy")
    facts = {"device": "cpu", "dtype": {"input": "bf16"}}
    assert site.select(**facts, mode="capture").kernel_id == "mid.toy"
    assert not site.trace().autotuned
    assert hook.measured == []
    epoch = selector.epoch
    assert site.select(**facts).kernel_id == "slow.toy"
    assert selector.epoch == epoch + 1
    assert site.select(**facts, mode="capture").kernel_id == "slow.toy"
    selector.select(query(shape={"M": 9}))
    assert selector.epoch == epoch + 1, "other workloads forget nothing"


def test_other_rules_use_the_times_of_the_same_rows(toy, tmp_path):
    cache = tmp_path / "winners.json"
    tuned(toy, Hook(), autotune_cache=cache).select(query())
    hook = Hook()
    rule = {"rules": [{"prefer": ["fast.toy", "slow.toy"]}]}
    assert tuned(toy, hook, rule, autotune_cache=cache).select(query()).kernel_id == "slow.toy"
    assert hook.measured == []
    sized = {"rules": [{"prefer": ["fast.toy", "mid.toy"], "params": {"size": 2}}]}
    selection = tuned(toy, hook, sized, autotune_cache=cache).select(query())
    assert selection.kernel_id == "mid.toy"
    assert hook.measured == ["fast.toy", "mid.toy", "slow.toy"], "other params are other rows"
    assert 'mid.toy {"size":2}' in stored_times(cache)[0]


def test_rows_that_failed_are_remembered(make, tmp_path):
    cache = tmp_path / "winners.json"
    catalog = make(fast_toy=ImportError("no cudnn"))
    hook = Hook({**TIMES, "mid.toy": RuntimeError("no inputs")})
    selection = tuned(catalog, hook, autotune_cache=cache).select(query())
    assert selection.kernel_id == "slow.toy"
    assert "not measured: RuntimeError: no inputs" in selection.trace.text
    assert stored_times(cache) == [{"fast.toy": None, "mid.toy": None, "slow.toy": 2.0}]
    assert tuned(catalog, hook, autotune_cache=cache).select(query()).kernel_id == "slow.toy"
    assert hook.measured == ["mid.toy", "slow.toy"]


def test_a_winner_that_cannot_be_prepared_any_more_gives_way_to_the_next(toy, make, tmp_path):
    cache = tmp_path / "winners.json"
    tuned(toy, Hook(), autotune_cache=cache).select(query())
    broken = make(mid_toy=ImportError("gone"))
    hook = Hook()
    assert tuned(broken, hook, autotune_cache=cache).select(query()).kernel_id == "slow.toy"
    assert hook.measured == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_times_that_make_no_sense_do_not_win(toy, value):
    selection = tuned(toy, Hook({**TIMES, "fast.toy": value})).select(query())
    assert selection.kernel_id == "mid.toy"
    assert f"not measured: the hook returned {value}" in selection.trace.text


def test_stored_times_are_explained_without_measuring(toy, tmp_path):
    cache = tmp_path / "winners.json"
    tuned(toy, Hook(), autotune_cache=cache).select(query())
    hook = Hook()
    trace = tuned(toy, hook, autotune_cache=cache).explain(query())
    assert {row.kernel_id: row.benchmark_ms for row in trace.candidates} == TIMES
    assert (trace.selected, trace.autotuned, hook.measured) == ("mid.toy", True, [])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        "{broken",
        '{"a": 1}',
        '{"schema": "phyai.autotune/v1", "workloads": {"x": {"milliseconds": {"mid.toy": "1"}}}}',
    ],
)
def test_broken_cache_files_are_ignored_and_replaced(toy, tmp_path, content):
    cache = tmp_path / "winners.json"
    cache.write_text(content)
    assert tuned(toy, Hook(), autotune_cache=cache).select(query()).kernel_id == "mid.toy"
    assert stored_times(cache) == [TIMES]


def test_unwritable_cache_does_not_stop_selection(toy, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    selector = tuned(toy, Hook(), autotune_cache=blocker / "winners.json")
    assert selector.select(query()).kernel_id == "mid.toy"


def test_call_sites_tune_each_shape(toy):
    hook = Hook()
    set_kernel_selector(tuned(toy, hook))
    site = CallSite("toy", dims={"M": 4})
    for rows in (4, 4, 100):
        site.select(device="cpu", dtype={"input": torch.bfloat16}, dims={"M": rows})
    assert len(hook.measured) == 6


@pytest.mark.parametrize(
    ("op", "facts"),
    [
        (
            "gemm",
            {
                "dtype": {"input": "fp32", "output": "fp32"},
                "quant": {"format": "bf16"},
                "dims": {"M": 3, "N": 5, "K": 7},
            },
        ),
        (
            "rmsnorm",
            {
                "dtype": {"input": "bf16", "weight": "fp32"},
                "dims": {"tokens": 3, "hidden": 7},
                "attrs": {"variant": "gemma"},
            },
        ),
        (
            "rmsnorm_add",
            {
                "dtype": {"input": "fp16", "weight": "fp16", "residual": "fp32"},
                "dims": {"tokens": 3, "hidden": 7},
                "attrs": {"variant": "rms"},
            },
        ),
        (
            "layernorm",
            {
                "dtype": {"input": "fp32", "weight": "fp32", "bias": "fp32"},
                "dims": {"tokens": 3, "hidden": 7},
                "attrs": {"bias": True},
            },
        ),
    ],
)
def test_built_in_measurement_runs_and_picks_the_faster_row(op, facts, monkeypatch):
    """A second row, slower by the clock but of higher priority, must lose."""
    from types import SimpleNamespace

    from phyai.dispatch import benchmark, bootstrap
    from phyai.dispatch.catalog import build_catalog
    from phyai.dispatch.conditions import eq
    from phyai.dispatch.opspec import Impl

    clock = [0.0]
    monkeypatch.setattr(benchmark, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    catalog = build_catalog()
    reference = next(impl for impl in catalog.impls(op) if impl.reference)

    def prepare_slow(known, params):
        run = reference.prepare(known, params)

        def slow(*args, **kwargs):
            clock[0] += 0.01
            return run(*args, **kwargs)

        return slow

    row = Impl(kernel_id=f"slow.{op}", op=op, when=eq("op", op), prepare=prepare_slow, priority=19)
    catalog.register(row)
    monkeypatch.setattr(bootstrap, "build_catalog", lambda: catalog)
    selector = initialize_kernel_system(KernelConfig(profile="autotune"), device="cpu")
    selection = selector.select(KernelQuery.build(op, **facts))
    assert selection.kernel_id == reference.kernel_id
    assert selection.trace.autotuned
    times = {row.kernel_id: row.benchmark_ms for row in selection.trace.candidates}
    assert times[f"slow.{op}"] == pytest.approx(10)


def test_quantized_gemm_and_attention_fall_back_to_priority():
    selector = initialize_kernel_system(KernelConfig(profile="autotune"), device="cpu")
    gemm = KernelQuery.build(
        "gemm", dtype="fp32", quant={"format": "int8", "layout": "convrot"}, dims={"M": 1}
    )
    assert not selector.select(gemm).trace.autotuned
    attention = KernelQuery.build(
        "attention", dtype="fp32", attrs={"layout": "padded", "causal": False}
    )
    selection = selector.select(attention)
    assert (selection.kernel_id, selection.trace.autotuned) == ("sdpa.attention", False)


def test_threads_that_ask_at_once_measure_once(toy):
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    hook, barrier = Hook(), Barrier(8)
    selector = tuned(toy, hook)

    def ask(number):
        barrier.wait()
        return selector.select(query(shape={"M": 33 + number})).kernel_id

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {"mid.toy"}
    assert hook.measured == ["fast.toy", "mid.toy", "slow.toy"]
