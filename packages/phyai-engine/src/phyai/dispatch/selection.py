"""A prepared row, and the assessment of every row that led to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from phyai.dispatch.catalog import Catalog, OpEntry
from phyai.dispatch.explain_rules import rule_traces
from phyai.dispatch.facts import Facts
from phyai.dispatch.opspec import Impl
from phyai.dispatch.policy import Decision, Policy
from phyai.dispatch.trace import CandidateTrace, RuleTrace, SelectionTrace
from phyai.dispatch.types import Fallback, KernelMode, KernelQuery, Profile


class Selection:
    """A prepared row.

    Attributes:
        impl: the row.
        query: the query it was chosen for.
        facts: the facts it was prepared with.
        execute: the prepared callable; its calling convention is the operation's ``signature``.
        params: policy params it was prepared with.
        trace: why it was chosen.
    """

    __slots__ = ("execute", "facts", "impl", "params", "query", "trace")

    def __init__(
        self,
        impl: Impl,
        query: KernelQuery,
        facts: Facts,
        execute: Callable[..., Any],
        params: Mapping[str, Any],
        trace: SelectionTrace,
    ) -> None:
        self.impl: Impl = impl
        self.query: KernelQuery = query
        self.facts: Facts = facts
        self.execute: Callable[..., Any] = execute
        self.params: Mapping[str, Any] = params
        self.trace: SelectionTrace = trace

    @property
    def kernel_id(self) -> str:
        """Id of the row."""
        return self.impl.kernel_id

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `execute`."""
        return self.execute(*args, **kwargs)

    def same_choice(self, other: "Selection") -> bool:
        """Whether both run the same prepared callable."""
        return self is other or (self.impl is other.impl and self.execute is other.execute)

    def __repr__(self) -> str:
        return f"Selection({self.kernel_id!r})"


@dataclass
class Assessment:
    """Rows of one query: the verdict on each, and the usable ones in order."""

    query: KernelQuery
    facts: Facts
    decision: Decision
    candidates: dict[str, CandidateTrace]
    order: list[Impl]
    rules: tuple[RuleTrace, ...] = ()

    def params(self, impl: Impl) -> Mapping[str, Any]:
        """Returns the policy params for a row: none unless the deciding rule names it."""
        rule = self.decision.rule
        if rule is None or impl.kernel_id not in self.decision.candidates:
            return {}
        return rule.params_for(impl)

    def trace(
        self, profile: Profile, selected: str | None, *, autotuned: bool = False
    ) -> SelectionTrace:
        """Returns the record of this assessment with its outcome."""
        return SelectionTrace(
            op=self.query.op,
            role=self.query.role,
            facts={**self.facts.as_dict(), "mode": str(self.query.mode)},
            policy_profile=str(profile),
            matched_rules=self.decision.matched_rules,
            candidates=tuple(self.candidates.values()),
            selected=selected,
            autotuned=autotuned,
            rules=self.rules,
        )

    def note(self, kernel_id: str, **changes: Any) -> None:
        """Changes fields of one row's record."""
        self.candidates[kernel_id] = replace(self.candidates[kernel_id], **changes)


def assess(
    catalog: Catalog, policy: Policy, query: KernelQuery, prefer: tuple[str, ...]
) -> Assessment:
    """Checks every row's condition, applies the policy and orders the usable rows."""
    entry = catalog.entry(query.op)
    facts = entry.facts(query)
    decision = policy.decide(facts, catalog)
    candidates = {impl.kernel_id: _verdict(impl, facts, query.mode) for impl in entry.impls}
    rules = rule_traces(policy, facts, decision.rule)
    assessment = Assessment(query, facts, decision, candidates, [], rules)
    _rank(assessment, entry, prefer)
    return assessment


def _verdict(impl: Impl, facts: Facts, mode: KernelMode) -> CandidateTrace:
    when = impl.condition
    if mode is not KernelMode.EAGER and not impl.capture_safe:
        return CandidateTrace(impl.kernel_id, False, when, f"is not capture-safe (mode {mode})")
    outcome = impl.when.eval(facts)
    return CandidateTrace(impl.kernel_id, outcome.ok, when, outcome.reason, skipped=outcome.skipped)


def _rank(assessment: Assessment, entry: OpEntry, prefer: tuple[str, ...]) -> None:
    decision = assessment.decision
    eligible = {
        impl.kernel_id: impl
        for impl in entry.impls
        if assessment.candidates[impl.kernel_id].eligible
    }
    if decision.rule is None:
        for kernel_id in [key for key, impl in eligible.items() if impl.explicit]:
            del eligible[kernel_id]
            assessment.note(kernel_id, excluded="changes results; a policy rule must name it")
        hinted = [kernel_id for kernel_id in prefer if kernel_id in eligible]
        order = [*hinted, *(key for key in eligible if key not in hinted)]
        only_references = all(impl.reference for impl in entry.impls)
        if decision.fallback is Fallback.ERROR and not only_references:
            order = [key for key in order if not eligible[key].reference]
        why = "reference rows are excluded by fallback: error"
    else:
        order = [kernel_id for kernel_id in decision.candidates if kernel_id in eligible]
        if not decision.strict and decision.fallback is Fallback.REFERENCE:
            order += [k for k, impl in eligible.items() if impl.reference and k not in order]
        why = f"not named by {decision.rule.id!r}"
    for kernel_id in eligible.keys() - set(order):
        assessment.note(kernel_id, excluded=why)
    assessment.order = [eligible[kernel_id] for kernel_id in order]
