"""Measured winners: how rows are compared and their times remembered."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from phyai.dispatch.facts import Facts
from phyai.dispatch.opspec import Impl
from phyai.dispatch.tune_store import Times, TuneStore
from phyai.dispatch.tune_workload import Workload
from phyai.dispatch.types import DeviceProfile

if TYPE_CHECKING:
    from phyai.dispatch.selection import Selection

Benchmark = Callable[[Impl, Facts, "Selection"], float]
"""Returns milliseconds per call; an exception skips the row.

A hook that also has ``compare`` is given all rows of a workload at once; see
`ComparingBenchmark`."""


class ComparingBenchmark(Protocol):
    """A hook that measures rows against each other, as `default_benchmark` does."""

    def compare(self, selections: Sequence["Selection"]) -> Mapping[str, float | Exception]:
        """Returns milliseconds by row id, or why a row could not be measured."""
        ...


def row_label(kernel_id: str, params: Mapping[str, Any]) -> str:
    """Returns the name under which the time of a row is kept: its id and its policy params."""
    if not params:
        return kernel_id
    text = json.dumps(params, sort_keys=True, separators=(",", ":"), default=str)
    return f"{kernel_id} {text}"


class Tuner:
    """Measures prepared rows and remembers their times by workload.

    Args:
        benchmark: measures prepared rows; None disables measuring and recalling.
        cache: JSON file of times; None keeps them in memory.
    """

    def __init__(self, benchmark: Benchmark | None, cache: str | Path | None) -> None:
        if benchmark is not None and not callable(benchmark):
            raise TypeError(f"benchmark must be callable, got {type(benchmark).__name__}")
        self._benchmark = benchmark
        self._store = TuneStore(cache)

    @property
    def enabled(self) -> bool:
        """Whether rows can be measured."""
        return self._benchmark is not None

    def workload(
        self, catalog_version: str, facts: Facts, device: DeviceProfile | None
    ) -> Workload:
        """Returns the key under which times of a call are kept."""
        return Workload.of(catalog_version, facts, device)

    def recall(self, workload: Workload, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """Returns known times by row id, fastest first.

        Empty unless every row was tried: a row that was never measured might be the fastest.

        Args:
            workload: what is asked for.
            rows: candidate ids with their policy params.
        """
        known = self._store.times(workload)
        labels = {kernel_id: row_label(kernel_id, params) for kernel_id, params in rows.items()}
        if any(label not in known for label in labels.values()):
            return {}
        return _ranked({kernel_id: known[label] for kernel_id, label in labels.items()})

    def measure(
        self,
        workload: Workload,
        prepared: Sequence["Selection"],
        unusable: Mapping[str, Mapping[str, Any]],
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Measures every prepared row.

        Stores the result unless no row could be measured.

        Args:
            workload: what the rows are measured for.
            prepared: rows to measure.
            unusable: ids, with policy params, of candidates that could not be prepared.

        Returns:
            Times by row id, fastest first, and why each of the other rows has none.
        """
        times: Times = {}
        problems: dict[str, str] = {}
        for kernel_id, result in self._compare(prepared).items():
            problem = _problem(result)
            times[kernel_id] = None if problem else float(cast("float", result))
            if problem:
                problems[kernel_id] = problem
        ranked = _ranked(times)
        if ranked:
            known: Times = {row_label(key, params): None for key, params in unusable.items()}
            for item in prepared:
                known[row_label(item.kernel_id, item.params)] = times.get(item.kernel_id)
            self._store.add(workload, known)
        return ranked, problems

    def _compare(self, prepared: Sequence["Selection"]) -> Mapping[str, float | Exception]:
        benchmark = self._benchmark
        if benchmark is None:
            return {}
        if hasattr(benchmark, "compare"):
            try:
                return cast("ComparingBenchmark", benchmark).compare(prepared)
            except Exception as error:
                return dict.fromkeys((item.kernel_id for item in prepared), error)
        results: dict[str, float | Exception] = {}
        for item in prepared:
            try:
                results[item.kernel_id] = float(benchmark(item.impl, item.facts, item))
            except Exception as error:
                results[item.kernel_id] = error
        return results


def _problem(result: float | Exception) -> str:
    if isinstance(result, Exception):
        return f"{type(result).__name__}: {result}"
    return "" if math.isfinite(result) and result >= 0 else f"the hook returned {result}"


def _ranked(times: Mapping[str, float | None]) -> dict[str, float]:
    measured = {key: value for key, value in times.items() if value is not None}
    return dict(sorted(measured.items(), key=lambda item: (item[1], item[0])))
