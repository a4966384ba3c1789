"""The record of one choice, in text and JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CandidateTrace:
    """What happened to one row.

    Attributes:
        kernel_id: the row.
        eligible: whether its condition holds.
        when: its condition.
        reason: why the condition does not hold; empty if it does.
        excluded: why the policy leaves an eligible row out; empty if it does not.
        skipped: optional facts that were not supplied.
        prepared: whether the row was prepared for this choice.
        prepare_error: why preparing failed; empty if it did not.
        benchmark_ms: measured time per call, or None.
        measure_error: why measuring failed; empty if it did not.
    """

    kernel_id: str
    eligible: bool
    when: str
    reason: str = ""
    excluded: str = ""
    skipped: tuple[str, ...] = ()
    prepared: bool = False
    prepare_error: str = ""
    benchmark_ms: float | None = None
    measure_error: str = ""

    def lines(self) -> list[str]:
        """Returns the text lines of this row."""
        lines = [f"  {'ok' if self.eligible else 'no'} {self.kernel_id}: {self.when}"]
        if self.reason:
            lines.append(f"       rejected: {self.reason}")
        if self.excluded:
            lines.append(f"       excluded: {self.excluded}")
        if self.prepare_error:
            lines.append(f"       prepare failed: {self.prepare_error}")
        if self.skipped:
            lines.append(f"       vacuous: {', '.join(self.skipped)} not provided")
        if self.benchmark_ms is not None:
            lines.append(f"       measured: {self.benchmark_ms:.4f} ms")
        if self.measure_error:
            lines.append(f"       not measured: {self.measure_error}")
        return lines


@dataclass(frozen=True, slots=True)
class RuleTrace:
    """What one policy rule had to say about a call.

    Attributes:
        id: the rule.
        kind: ``override`` or ``rule``.
        priority: its priority.
        matched: whether its conditions hold.
        decides: whether it is the one that was followed.
        reason: why it does not match, or what it is outranked by; empty if it decides.
        line: line in the policy file.
    """

    id: str
    kind: str
    priority: int
    matched: bool
    decides: bool
    reason: str = ""
    line: int | None = None

    def text(self) -> str:
        """Returns the verdict in words."""
        if self.decides:
            return f"{self.kind} {self.id!r} decides"
        verdict = "matches, but" if self.matched else "does not match:"
        return f"{self.kind} {self.id!r} {verdict} {self.reason}"


@dataclass(frozen=True, slots=True)
class SelectionTrace:
    """Why one row was chosen for one call.

    Attributes:
        op: operation.
        role: call-site role.
        facts: the facts known at the choice.
        policy_profile: ``static`` or ``autotune``.
        matched_rules: ids of the policy rules that decided.
        candidates: every row of the operation in priority order.
        selected: id of the chosen row, or None.
        autotuned: whether a measurement decided.
        rules: every override and rule about this operation, with its verdict.
    """

    op: str
    role: str
    facts: Mapping[str, Any]
    policy_profile: str
    matched_rules: tuple[str, ...]
    candidates: tuple[CandidateTrace, ...]
    selected: str | None
    autotuned: bool = False
    rules: tuple[RuleTrace, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns a JSON-able dict."""
        return asdict(self) | {"facts": dict(self.facts)}

    def to_json(self) -> str:
        """Returns JSON with sorted keys."""
        return json.dumps(self.as_dict(), sort_keys=True)

    @property
    def text(self) -> str:
        """The readable form: the choice, the rules, then every row with its verdict."""
        chosen = self.selected or "nothing"
        how = " (measured)" if self.autotuned else ""
        lines = [f"{self.op} role={self.role or '-'} selected={chosen}{how}"]
        if self.matched_rules:
            lines.append(f"  policy rules: {', '.join(self.matched_rules)}")
        lines.extend(f"  {rule.text()}" for rule in self.rules if not rule.decides)
        for candidate in self.candidates:
            lines.extend(candidate.lines())
        return "\n".join(lines)

    def explain(self) -> str:
        """Returns `text`."""
        return self.text

    def __str__(self) -> str:
        return self.text
