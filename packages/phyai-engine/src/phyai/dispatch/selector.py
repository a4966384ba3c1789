"""The selector: facts, conditions and policy in, one prepared row out."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from phyai.dispatch.autotune import Benchmark, Tuner
from phyai.dispatch.catalog import Catalog, build_catalog
from phyai.dispatch.device import probe_device
from phyai.dispatch.errors import NoKernelError, PolicyError
from phyai.dispatch.opspec import Impl
from phyai.dispatch.policy import Policy
from phyai.dispatch.selection import Assessment, Selection, assess
from phyai.dispatch.trace import SelectionTrace
from phyai.dispatch.tune_workload import Workload
from phyai.dispatch.types import DeviceProfile, KernelMode, KernelQuery, ModelContext, Profile

_CACHE_LIMIT = 8192


class Selector:
    """Chooses and prepares rows for one device, model and policy.

    Args:
        catalog: rows to choose from; None builds the default catalog.
        policy: None is the empty policy.
        device: anything `probe_device` takes; used for queries that name no device.
        model: used for queries that name no model.
        benchmark: measures a prepared row for the autotune profile; None disables measuring.
        autotune_cache: JSON file that keeps measured times.
    """

    def __init__(
        self,
        catalog: Catalog | None = None,
        policy: Policy | None = None,
        *,
        device: Any = None,
        model: ModelContext | None = None,
        benchmark: Benchmark | None = None,
        autotune_cache: str | Path | None = None,
    ) -> None:
        self.catalog: Catalog = catalog if catalog is not None else build_catalog()
        self._policy = policy if policy is not None else Policy()
        self._device = probe_device(device)
        self._model = model if model is not None else ModelContext()
        self._tuner = Tuner(benchmark, autotune_cache)
        self._cache: dict[Any, Selection] = {}
        self._untuned: set[str] = set()
        self._revision = self.catalog.revision
        self._lock = threading.RLock()
        self.epoch: int = 0

    @property
    def policy(self) -> Policy:
        """The policy; assigning one drops every cached choice."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy
        self.clear_cache()

    @property
    def device(self) -> DeviceProfile:
        """The device profile; assigning one drops every cached choice."""
        return self._device

    @device.setter
    def device(self, device: Any) -> None:
        self._device = probe_device(device)
        self.clear_cache()

    @property
    def model(self) -> ModelContext:
        """The model context; assigning one drops every cached choice."""
        return self._model

    @model.setter
    def model(self, model: ModelContext) -> None:
        self._model = model
        self.clear_cache()

    def clear_cache(self) -> None:
        """Forgets every choice; call sites notice through `epoch`."""
        with self._lock:
            self._cache.clear()
            self.epoch += 1

    def select(self, query: KernelQuery, prefer: tuple[str, ...] = ()) -> Selection:
        """Returns the prepared row for a query.

        Args:
            query: what is asked for.
            prefer: ids to try first, unless a policy rule matches.

        Raises:
            UnknownOperationError: if there is no such operation.
            NoKernelError: if no row is usable; the text lists the reason of each.
            PolicyError: if rules conflict, or params of the policy are bad.
        """
        if self._revision != self.catalog.revision:
            self.clear_cache()
            self._revision = self.catalog.revision
        key = (query.cache_key, prefer)
        hit = self._cache.get(key)
        if hit is not None:
            return hit
        with self._lock:
            # Another thread may have prepared it while this one waited.
            hit = self._cache.get(key)
            if hit is not None:
                return hit
            selection = self._choose(self._assess(query, prefer))
            if len(self._cache) >= _CACHE_LIMIT:
                self._cache.clear()
            self._cache[key] = selection
        return selection

    def explain(self, query: KernelQuery, prefer: tuple[str, ...] = ()) -> SelectionTrace:
        """Returns what `select` would choose and why, without preparing anything."""
        if self._revision == self.catalog.revision:
            hit = self._cache.get((query.cache_key, prefer))
            if hit is not None:
                return hit.trace
        assessment = self._assess(query, prefer)
        order = assessment.order
        times: dict[str, float] = {}
        if len(order) > 1 and self._tunes(assessment):
            times = self._recall(self._workload(assessment), assessment)
        selected = next(iter(times), order[0].kernel_id if order else None)
        return assessment.trace(self._policy.profile, selected, autotuned=bool(times))

    def _assess(self, query: KernelQuery, prefer: tuple[str, ...]) -> Assessment:
        if query.device is None or query.model is None:
            query = replace(
                query, device=query.device or self._device, model=query.model or self._model
            )
        return assess(self.catalog, self._policy, query, prefer)

    def _choose(self, assessment: Assessment) -> Selection:
        if not assessment.order:
            raise self._no_kernel(assessment, "no usable implementation")
        if self._tunes(assessment) and len(assessment.order) > 1:
            tuned = self._choose_tuned(assessment)
            if tuned is not None:
                return tuned
        for impl in assessment.order:
            execute = self._prepare(impl, assessment)
            if execute is not None:
                return self._selected(impl, execute, assessment)
        raise self._no_kernel(assessment, "every usable implementation failed to prepare")

    def _choose_tuned(self, assessment: Assessment) -> Selection | None:
        """Returns the fastest row, measured now if need be; None if nothing is known of it."""
        workload = self._workload(assessment)
        for kernel_id in self._recall(workload, assessment):
            impl = self.catalog.impl(kernel_id)
            execute = self._prepare(impl, assessment)
            if execute is not None:
                return self._selected(impl, execute, assessment, autotuned=True)
        if assessment.query.mode is not KernelMode.EAGER:
            self._untuned.add(workload.digest)
            return None
        prepared: dict[str, Selection] = {}
        for impl in assessment.order:
            execute = self._prepare(impl, assessment)
            if execute is not None:
                prepared[impl.kernel_id] = self._selected(impl, execute, assessment)
        unusable = {
            impl.kernel_id: assessment.params(impl)
            for impl in assessment.order
            if impl.kernel_id not in prepared
        }
        times, problems = self._tuner.measure(workload, list(prepared.values()), unusable)
        for kernel_id, problem in problems.items():
            assessment.note(kernel_id, measure_error=problem)
        if times and workload.digest in self._untuned:
            # A captured call was given a row before anything was measured.
            self._untuned.discard(workload.digest)
            self.clear_cache()
        _note_times(assessment, times)
        best = next(iter([*times, *prepared]), None)
        if best is None:
            return None
        chosen = prepared[best]
        return self._selected(chosen.impl, chosen.execute, assessment, autotuned=bool(times))

    def _selected(
        self,
        impl: Impl,
        execute: Callable[..., Any],
        assessment: Assessment,
        *,
        autotuned: bool = False,
    ) -> Selection:
        trace = assessment.trace(self._policy.profile, impl.kernel_id, autotuned=autotuned)
        params = assessment.params(impl)
        return Selection(impl, assessment.query, assessment.facts, execute, params, trace)

    def _prepare(self, impl: Impl, assessment: Assessment) -> Callable[..., Any] | None:
        params = assessment.params(impl)
        if impl.check_params is not None and params:
            try:
                impl.check_params(params)
            except (TypeError, ValueError) as error:
                rule = assessment.decision.rule
                raise PolicyError(
                    f"params of row {impl.kernel_id!r}: {error}",
                    source=self._policy.source,
                    line=rule.line if rule else None,
                ) from error
        try:
            execute = impl.prepare(assessment.facts, params)
        except PolicyError:
            raise
        except Exception as error:
            assessment.note(impl.kernel_id, prepare_error=f"{type(error).__name__}: {error}")
            return None
        assessment.note(impl.kernel_id, prepared=True)
        return execute

    def _tunes(self, assessment: Assessment) -> bool:
        return (
            self._policy.profile is Profile.AUTOTUNE
            and self._tuner.enabled
            and not assessment.decision.strict
        )

    def _workload(self, assessment: Assessment) -> Workload:
        return self._tuner.workload(self.catalog.version, assessment.facts, assessment.query.device)

    def _recall(self, workload: Workload, assessment: Assessment) -> dict[str, float]:
        rows = {impl.kernel_id: assessment.params(impl) for impl in assessment.order}
        times = self._tuner.recall(workload, rows)
        _note_times(assessment, times)
        return times

    def _no_kernel(self, assessment: Assessment, why: str) -> NoKernelError:
        query, decision = assessment.query, assessment.decision
        rule = decision.rule
        asked = ""
        if rule is not None:
            kind = "override" if rule.strict else "rule"
            asked = f" among the rows of {kind} {rule.id!r} ({', '.join(decision.candidates)})"
        trace = assessment.trace(self._policy.profile, None)
        return NoKernelError(
            f"{why} of {query.op!r} role {query.role!r}{asked}; "
            f"fallback: {decision.fallback}\n{trace.text}"
        )


def _note_times(assessment: Assessment, times: Mapping[str, float]) -> None:
    for kernel_id, milliseconds in times.items():
        assessment.note(kernel_id, benchmark_ms=milliseconds)
