"""Kernel choices as text: identical ones merged, each refusal with its reason."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    """

    trace: Trace
    count: int = 0
    shapes: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the trace without shape facts, with the count and the shapes."""
        facts = {
            name: value
            for name, value in self.trace["facts"].items()
            if not name.startswith(SHAPE_PREFIX) and name not in INDIVIDUAL_FACTS
        }
        shapes = [{"shape": shape, "count": count} for shape, count in self.shapes.items()]
        return {**self.trace, "facts": facts, "count": self.count, "shapes": shapes}


def group_traces(traces: Iterable[Trace]) -> list[SiteGroup]:
    """Merge the traces of sites that differ in nothing but shape and layer.

    Args:
        traces: ``SelectionTrace.as_dict()`` of each call site.

    Returns:
        Groups in the order of their first site.
    """
    groups: dict[tuple[Any, ...], SiteGroup] = {}
    for trace in traces:
        group = groups.setdefault(_decision(trace), SiteGroup(trace))
        group.count += 1
        shape = _facts_text(trace["facts"], shapes=True)
        group.shapes[shape] = group.shapes.get(shape, 0) + 1
    return list(groups.values())


def _decision(trace: Trace) -> tuple[Any, ...]:
    candidates = tuple(
        (row["kernel_id"], row["reason"], row["excluded"], row["prepare_error"])
        for row in trace["candidates"]
    )
    kept = _facts_text(trace["facts"], shapes=False)
    rules = tuple(trace["matched_rules"])
    return trace["op"], trace["role"], trace["selected"], rules, kept, candidates


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
    role = f"  role {trace['role']}" if trace["role"] else ""
    sites = f"  ({group.count} sites)" if group.count > 1 else ""
    lines = [f"{trace['op']}{role}  ->  {trace['selected'] or 'NO KERNEL'}{sites}"]
    facts = _facts_text(trace["facts"], shapes=False)
    if facts:
        lines.append(f"  facts     {facts}")
    for shape, count in group.shapes.items():
        if shape:
            times = f"{count} x " if group.count > 1 else ""
            lines.append(f"  shape     {times}{shape}")
    lines.append(f"  rules     {', '.join(trace['matched_rules']) or 'none matched'}")
    width = max((len(row["kernel_id"]) for row in trace["candidates"]), default=0)
    lines.extend(_candidate_line(row, trace["selected"], width) for row in trace["candidates"])
    return lines


def _candidate_line(row: Mapping[str, Any], selected: str | None, width: int) -> str:
    name = f"{row['kernel_id']:<{width}}"
    if row["kernel_id"] == selected:
        return f"  chosen    {name}".rstrip()
    if row["prepare_error"]:
        return f"  rejected  {name}  prepare failed: {row['prepare_error']}"
    if not row["eligible"]:
        return f"  rejected  {name}  {row['reason']}"
    if row["excluded"]:
        return f"  excluded  {name}  {row['excluded']}"
    return f"  possible  {name}".rstrip()
