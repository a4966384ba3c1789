"""The built-in measurement: rows in turn, equal inputs, device events, failures kept apart."""

import statistics
from types import SimpleNamespace

import pytest
import torch

from phyai.dispatch import KernelQuery, Selector, benchmark, probe_device
from phyai.dispatch.benchmark import ROUNDS, WARM_UPS, InterleavedBenchmark, default_benchmark
from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import is_set
from phyai.dispatch.opspec import Impl, OpSpec
from phyai.dispatch.selection import Selection


class Rows:
    """An operation whose rows note every call: which row, on what, and what it found there."""

    def __init__(self, monkeypatch, costs, errors=None):
        self.calls, self.clock, self.errors = [], 0.0, errors or {}
        monkeypatch.setattr(benchmark, "time", SimpleNamespace(perf_counter=lambda: self.clock))
        self.catalog = Catalog()
        self.catalog.register_op(
            OpSpec(name="toy", dtypes=("input",), bench_args=lambda facts, device: (torch.ones(4),))
        )
        for name, cost in costs.items():
            self.catalog.register(
                Impl(
                    kernel_id=f"{name}.toy",
                    op="toy",
                    when=is_set("dtype.input"),
                    prepare=self.prepare(name, cost),
                    priority=4,
                    reference=True,
                )
            )

    def prepare(self, name, cost):
        def run(x):
            if name in self.errors:
                raise self.errors[name]
            self.calls.append((name, x.data_ptr(), float(x.sum())))
            x.add_(1)
            self.clock += cost(len(self.calls)) if callable(cost) else cost

        return lambda facts, params: run

    def selections(self, device="cpu"):
        query = KernelQuery.build("toy", dtype="bf16", device=device)
        facts = self.catalog.entry("toy").facts(query)
        return [
            Selection(impl, query, facts, impl.prepare(facts, {}), {}, None)
            for impl in self.catalog.impls("toy")
        ]


def test_rows_take_turns_on_equal_inputs(monkeypatch):
    rows = Rows(monkeypatch, {"a": 0.001, "b": 0.002, "c": 0.003})
    times = default_benchmark(rows.catalog).compare(rows.selections())
    assert times == {
        "a.toy": pytest.approx(1),
        "b.toy": pytest.approx(2),
        "c.toy": pytest.approx(3),
    }
    timed = [name for name, _, _ in rows.calls][3 * WARM_UPS :]
    assert len(timed) == 3 * ROUNDS
    assert ["".join(timed[start : start + 3]) for start in range(0, 12, 3)] == [
        "abc",
        "bca",
        "cab",
        "abc",
    ]
    assert {total for _, _, total in rows.calls} == {4.0}, "work in place reaches no other call"
    addresses = [address for _, address, _ in rows.calls]
    assert len(set(addresses)) == len(addresses), "no call finds its inputs in the cache"


def test_drift_of_the_clock_hits_all_rows_alike(monkeypatch):
    """A machine that slows down all the time must not favour the row that came first."""

    def drifting(call):
        return 0.001 * (1 + call / 20)

    rows = Rows(monkeypatch, {"a": drifting, "b": drifting})
    times = default_benchmark(rows.catalog).compare(rows.selections())
    assert times["a.toy"] == pytest.approx(times["b.toy"], rel=0.05)


def test_one_outlier_changes_nothing(monkeypatch):
    rows = Rows(monkeypatch, {"a": lambda call: 5.0 if call == 10 else 0.002, "b": 0.003})
    times = default_benchmark(rows.catalog).compare(rows.selections())
    assert times == {"a.toy": pytest.approx(2), "b.toy": pytest.approx(3)}


def test_a_row_that_fails_does_not_stop_the_others(monkeypatch):
    error = RuntimeError("no kernel")
    rows = Rows(monkeypatch, {"a": 0.001, "b": 0.002}, {"a": error})
    hook = default_benchmark(rows.catalog)
    first, second = rows.selections()
    assert hook.compare([first, second]) == {"a.toy": error, "b.toy": pytest.approx(2)}
    assert hook(second.impl, second.facts, second) == pytest.approx(2)
    with pytest.raises(RuntimeError, match="no kernel"):
        hook(first.impl, first.facts, first)


def test_operations_without_inputs_are_refused():
    catalog = Catalog()
    catalog.register_op(OpSpec(name="toy", dtypes=("input",), requires_reference=False))
    query = KernelQuery.build("toy", dtype="bf16", device="cpu")
    selection = Selection(None, query, catalog.entry("toy").facts(query), None, {}, None)
    with pytest.raises(NotImplementedError, match="'toy' has no benchmark inputs"):
        InterleavedBenchmark(catalog).compare([selection])


class FakeCuda:
    """Device events on a clock that only kernels advance, and that launches run ahead of."""

    def __init__(self, monkeypatch, rows, capturing=False):
        self.rows, self.log = rows, []
        properties = SimpleNamespace(L2_cache_size=4096)
        cuda = {
            "device": lambda device: torch.no_grad(),
            "is_current_stream_capturing": lambda: capturing,
            "get_device_properties": lambda device: properties,
            "synchronize": lambda: self.log.append("synchronize"),
            "_sleep": lambda cycles: self.log.append("sleep"),
            "Event": self.event,
        }
        for name, value in cuda.items():
            monkeypatch.setattr(torch.cuda, name, value, raising=False)

    def event(self, *, enable_timing):
        assert enable_timing
        event = SimpleNamespace(at=None)

        def record():
            self.log.append("record")
            event.at = self.rows.clock

        event.record = record
        event.elapsed_time = lambda other: 1e3 * (other.at - event.at)
        return event


def test_a_gpu_is_timed_by_events_and_waited_for_once(monkeypatch):
    rows = Rows(monkeypatch, {"a": 0.001, "b": 0.002})
    fake = FakeCuda(monkeypatch, rows)
    times = default_benchmark(rows.catalog).compare(rows.selections(probe_device("nvidia:sm90")))
    assert times == {"a.toy": pytest.approx(1), "b.toy": pytest.approx(2)}
    assert fake.log == ["sleep", "record", "record"] * (2 * ROUNDS) + ["synchronize"]
    assert len({address for _, address, _ in rows.calls}) == 2 * (ROUNDS + WARM_UPS)


def test_nothing_is_measured_inside_a_capture(monkeypatch):
    rows = Rows(monkeypatch, {"a": 0.001, "b": 0.002})
    FakeCuda(monkeypatch, rows, capturing=True)
    with pytest.raises(RuntimeError, match="while a CUDA graph is being captured"):
        default_benchmark(rows.catalog).compare(rows.selections(probe_device("nvidia:sm90")))
    assert rows.calls == []


def test_the_median_is_reported(monkeypatch):
    costs = [0.001 * number for number in range(1, 100)]
    rows = Rows(monkeypatch, {"a": lambda call: costs[call]})
    (time,) = default_benchmark(rows.catalog).compare(rows.selections()).values()
    expected = statistics.median(costs[WARM_UPS + 1 : WARM_UPS + ROUNDS + 1])
    assert time == pytest.approx(1e3 * expected)


def test_selectors_measure_with_it(monkeypatch):
    from phyai.dispatch import policy_from_mapping

    rows = Rows(monkeypatch, {"a": 0.003, "b": 0.002})
    policy = policy_from_mapping({"profile": "autotune"}, catalog=rows.catalog)
    hook = default_benchmark(rows.catalog)
    selector = Selector(rows.catalog, policy, device="cpu", benchmark=hook)
    trace = selector.select(KernelQuery.build("toy", dtype="bf16")).trace
    assert (trace.selected, trace.autotuned) == ("b.toy", True)
    times = {row.kernel_id: row.benchmark_ms for row in trace.candidates}
    assert times == {"a.toy": pytest.approx(3), "b.toy": pytest.approx(2)}
