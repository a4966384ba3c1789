"""Kernel choices as text: identical ones merged, each refusal with its reason."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phyai.cli.names import compact_names

# Facts that differ between sites without making the choice a different one.
SHAPE_PREFIX = "shape."
INDIVIDUAL_FACTS = frozenset({"attrs.layer_id", "attrs.runner"})
# Facts that are the same for all sites of an engine; the head of the report names them.
COMMON_PREFIXES = ("device.", "model.", "lib.")

Trace = Mapping[str, Any]


@dataclass
class SiteGroup:
    """Call sites that got the same kernel for the same reasons.

    Attributes:
        trace: The trace of the first site, as a mapping.
        count: Number of sites.
        shapes: Shape facts of the sites, with the number of sites of each.
        names: Modules that own the sites, where they are known.
    """

    trace: Trace
    count: int = 0
    shapes: dict[str, int] = field(default_factory=dict)
    names: dict[str, None] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Operation, role and choice."""
        role = f"  role {self.trace['role']}" if self.trace["role"] else ""
        return f"{self.trace['op']}{role}  ->  {self.trace['selected'] or 'NO KERNEL'}"

    @property
    def facts(self) -> str:
        """The facts that all sites share, without those of the whole engine."""
        return _facts_text(self.trace["facts"], shapes=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the trace without shape facts, with the count, the shapes and the modules."""
        facts = {
            name: value
            for name, value in self.trace["facts"].items()
            if not name.startswith(SHAPE_PREFIX) and name not in INDIVIDUAL_FACTS
        }
        shapes = [{"shape": shape, "count": count} for shape, count in self.shapes.items()]
        return {
            **self.trace,
            "facts": facts,
            "count": self.count,
            "shapes": shapes,
            "modules": list(self.names),
        }


def group_traces(traces: Iterable[tuple[str, Trace]]) -> list[SiteGroup]:
    """Merge the traces of sites that differ in nothing but shape and layer.

    Args:
        traces: Module that owns the site, or an empty string, and ``SelectionTrace.as_dict()`` of
            each choice of each call site.

    Returns:
        Groups in the order of their first site.
    """
    groups: dict[tuple[Any, ...], SiteGroup] = {}
    for name, trace in traces:
        group = groups.setdefault(_decision(trace), SiteGroup(trace))
        group.count += 1
        if name:
            group.names[name] = None
        shape = _facts_text(trace["facts"], shapes=True)
        group.shapes[shape] = group.shapes.get(shape, 0) + 1
    return list(groups.values())


def _decision(trace: Trace) -> tuple[Any, ...]:
    candidates = tuple(
        (row["kernel_id"], row["reason"], row["excluded"], row["prepare_error"])
        for row in trace["candidates"]
    )
    kept = _facts_text(trace["facts"], shapes=False)
    rules = (*trace["matched_rules"], *(rule["reason"] for rule in trace["rules"]))
    problem = trace.get("problem", "")
    return trace["op"], trace["role"], trace["selected"], rules, kept, candidates, problem


def _facts_text(facts: Mapping[str, Any], *, shapes: bool) -> str:
    words = []
    for name, value in sorted(facts.items()):
        is_shape = name.startswith(SHAPE_PREFIX)
        hidden = name.startswith(COMMON_PREFIXES) or name in INDIVIDUAL_FACTS or "." not in name
        if is_shape == shapes and not hidden and value is not None:
            words.append(f"{name.removeprefix(SHAPE_PREFIX)}={value}")
    return " ".join(words)


def group_lines(group: SiteGroup) -> list[str]:
    """Return the report of one group: choice, facts, shapes, rules, and one line per candidate."""
    trace = group.trace
    lines = [group.title + (f"  ({group.count} sites)" if group.count > 1 else "")]
    lines.extend(f"  module    {name}" for name in compact_names(group.names))
    if group.facts:
        lines.append(f"  facts     {group.facts}")
    for shape, count in group.shapes.items():
        if shape:
            times = f"{count} x " if group.count > 1 else ""
            lines.append(f"  shape     {times}{shape}")
    lines.append(f"  rules     {', '.join(trace['matched_rules']) or 'none matched'}")
    lines.extend(
        f"  {verdict:<9} {rule['id']}  {rule['reason']}"
        for rule in trace["rules"]
        if (verdict := rule_verdict(rule)) != "decides"
    )
    if trace.get("problem"):
        lines.append(f"  problem   {trace['problem']}")
    width = max((len(row["kernel_id"]) for row in trace["candidates"]), default=0)
    for row in trace["candidates"]:
        verdict, reason = candidate_verdict(row, trace["selected"])
        lines.append(f"  {verdict:<9} {row['kernel_id']:<{width}}  {reason}".rstrip())
    return lines


def rule_verdict(rule: Mapping[str, Any]) -> str:
    """Return ``decides``, ``outranked`` or ``unmatched`` for one rule of a trace."""
    if rule["decides"]:
        return "decides"
    return "outranked" if rule["matched"] else "unmatched"


def candidate_verdict(row: Mapping[str, Any], selected: str | None) -> tuple[str, str]:
    """Return what became of one candidate, and why.

    Args:
        row: Entry of ``candidates`` of a trace.
        selected: Id of the chosen row.
    """
    if row["kernel_id"] == selected:
        return "chosen", _measurement(row)
    if row["prepare_error"]:
        return "rejected", f"prepare failed: {row['prepare_error']}"
    if not row["eligible"]:
        return "rejected", row["reason"]
    return ("excluded", row["excluded"]) if row["excluded"] else ("possible", _measurement(row))


def _measurement(row: Mapping[str, Any]) -> str:
    if row["benchmark_ms"] is not None:
        return f"measured {row['benchmark_ms']:.4f} ms"
    problem = row.get("measure_error", "")
    return f"not measured: {problem}" if problem else ""
