"""The explanation of a query or a model, as text, JSON and Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.cli.layer_formats import LayerFormat, format_lines, group_formats
from phyai.cli.names import compact_names
from phyai.cli.traces import SiteGroup, candidate_verdict, group_lines, rule_verdict

if TYPE_CHECKING:
    from phyai.dispatch import Selector


@dataclass(frozen=True)
class Report:
    """What was asked, and every answer.

    Attributes:
        device: Architecture or vendor that the answers are for.
        family: Model family that policy rules see; None if no model was asked for.
        policy: Source, version, profile and fallback of the policy in force.
        catalog: Version of the catalog.
        groups: Call sites, identical ones merged.
        formats: How each linear layer is stored; empty for a single query.
        checkpoint: Folder of the model; None for a single query.
    """

    device: str
    family: str | None
    policy: dict[str, str]
    catalog: str
    groups: list[SiteGroup]
    formats: list[LayerFormat] = field(default_factory=list)
    checkpoint: Path | None = None

    @property
    def sites(self) -> int:
        """Number of answers."""
        return sum(group.count for group in self.groups)

    @property
    def problems(self) -> list[str]:
        """What would stop the model on this device."""
        unstored = sum(bool(entry.problem) for entry in self.formats)
        unserved = sum(group.count for group in self.groups if group.trace["selected"] is None)
        found = [(unstored, "layers cannot be stored"), (unserved, "call sites have no kernel")]
        return [f"{count} {what}" for count, what in found if count]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "device": self.device,
            "family": self.family,
            "checkpoint": self.checkpoint,
            "policy": self.policy,
            "catalog": self.catalog,
            "problems": self.problems,
            "sites": self.sites,
            "groups": [group.as_dict() for group in self.groups],
            "layers": [entry.as_dict() for entry in self.formats],
        }


def policy_summary(selector: "Selector") -> dict[str, str]:
    """Return what identifies the policy that a selector follows."""
    policy = selector.policy
    return {
        "source": policy.source or "none",
        "version": policy.version,
        "profile": str(policy.profile),
        "fallback": str(policy.fallback),
    }


def text_report(report: Report) -> str:
    """Return the report as text."""
    counted = f"{report.sites} call sites" if report.sites > 1 else "1 call site"
    model = f"model {report.family}, " if report.family else ""
    lines = [f"device {report.device}, {model}{counted}"]
    lines += [f"PROBLEM: {problem}" for problem in report.problems]
    if report.formats:
        lines += ["", "weights", *format_lines(group_formats(report.formats))]
    for group in report.groups:
        lines += ["", *group_lines(group)]
    return "\n".join(lines) + "\n"


def markdown_report(report: Report) -> str:
    """Return the report as a Markdown page."""
    subject = report.checkpoint.resolve().name if report.checkpoint else "one query"
    lines = [f"# Kernels of {subject} on {report.device}", ""]
    facts = {
        "checkpoint": report.checkpoint,
        "model family": report.family,
        "device": report.device,
        "policy": f"{report.policy['source']} (version {report.policy['version']})",
        "profile, fallback": f"{report.policy['profile']}, {report.policy['fallback']}",
        "catalog version": report.catalog,
        "call sites": report.sites,
        "problems": "; ".join(report.problems) or "none",
    }
    lines += _table(["", ""], [[name, value] for name, value in facts.items() if value is not None])
    lines += ["", "## Choices", "", *_choices(report.groups)]
    if report.formats:
        lines += ["", "## Weights", "", *_weights(report.formats)]
    for number, group in enumerate(report.groups, 1):
        lines += ["", *_section(number, group)]
    return "\n".join(lines) + "\n"


def _choices(groups: Sequence[SiteGroup]) -> list[str]:
    rows = [
        [
            f"[{number}](#{number})",
            group.trace["op"],
            group.trace["role"],
            _code(group.trace["selected"]) if group.trace["selected"] else "**no kernel**",
            group.count,
            ", ".join(group.trace["matched_rules"]) or "none",
        ]
        for number, group in enumerate(groups, 1)
    ]
    return _table(["", "operation", "role", "kernel", "sites", "rules"], rows)


def _weights(formats: Iterable[LayerFormat]) -> list[str]:
    rows = [
        [
            "<br>".join(_code(name) for name in group.names),
            group.count,
            group.first.rule,
            group.first.scheme,
            _code(group.first.spec) if group.first.spec else f"**none**: {group.first.problem}",
        ]
        for group in group_formats(formats)
    ]
    return _table(["layers", "number", "rule", "scheme", "stored as"], rows)


def _section(number: int, group: SiteGroup) -> list[str]:
    trace = group.trace
    lines = [f'<a id="{number}"></a>', "", f"### {number}. {_plain_title(group)}", ""]
    modules = ", ".join(_code(name) for name in compact_names(group.names))
    shapes = "; ".join(f"{count} x {shape}" for shape, count in group.shapes.items() if shape)
    parts = {"Modules": modules, "Facts": group.facts, "Shapes": shapes}
    lines += [f"* {name}: {value}" for name, value in parts.items() if value]
    if trace.get("problem"):
        lines.append(f"* Problem: {trace['problem']}")
    if trace["rules"]:
        verdicts = [
            [rule["id"], rule["kind"], rule["priority"], rule_verdict(rule), rule["reason"]]
            for rule in trace["rules"]
        ]
        lines += ["", *_table(["rule", "kind", "priority", "verdict", "reason"], verdicts)]
    if trace["candidates"]:
        rows = [
            [_code(row["kernel_id"]), *candidate_verdict(row, trace["selected"])]
            for row in trace["candidates"]
        ]
        lines += ["", *_table(["kernel", "verdict", "reason"], rows)]
    return lines


def _plain_title(group: SiteGroup) -> str:
    role = f", role {group.trace['role']}" if group.trace["role"] else ""
    return f"{group.trace['op']}{role}: {group.trace['selected'] or 'no kernel'}"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    def cell(value: object) -> str:
        return str(value).replace("|", "\\|").replace("\n", " ")

    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(map(cell, line)) + " |" for line in lines]
