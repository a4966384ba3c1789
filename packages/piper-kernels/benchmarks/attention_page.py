"""Write the tables of ``docs/attention-performance.md`` from stored results.

    python attention_page.py [--check]

``--check`` writes nothing and fails where the page differs from the results.
"""

import sys
from pathlib import Path

from _attention_tables import LABELS, attention_table, quality_table, targets_table
from _attention_targets import evaluate
from _pages import MISSING, Page, environment_line, stored, tables_by_case
from _report import REPOSITORY


def measured(rows: list[dict]) -> list[dict]:
    """Return the rows of providers that were measured in one case at least."""
    present = {row["provider"] for row in rows if "skipped" not in row}
    return [row for row in rows if row["provider"] in present]


def absent(rows: list[dict]) -> str:
    """Return which providers were measured in no case, and why; empty if there are none."""
    present = {row["provider"] for row in measured(rows)}
    reasons = {row["provider"]: row["skipped"] for row in rows if row["provider"] not in present}
    said = "; ".join(f"{LABELS[name]} ({reason})" for name, reason in reasons.items())
    return f"\n\nNot measured: {said}." if said else ""


def sections(folder: Path) -> dict[str, str]:
    """Return the content of every marked part of the page."""
    names: list[str] = ["environment", "targets", "dense", "quality"]
    names += ["sparse environment", "sparse"]
    found = dict.fromkeys(names, MISSING)
    targets = []
    if dense := stored(folder, "attention"):
        found["environment"] = environment_line(dense) + absent(dense["rows"])
        found["dense"] = tables_by_case(measured(dense["rows"]), attention_table)
        found["quality"] = quality_table(measured(dense["quality"]))
        targets += evaluate(dense["rows"])
    if sparse := stored(folder, "sparse_attention"):
        found["sparse environment"] = environment_line(sparse)
        found["sparse"] = tables_by_case(measured(sparse["rows"]), attention_table)
        if sparse.get("quality"):
            found["sparse"] += f"\n\n### Quality\n\n{quality_table(sparse['quality'])}"
        targets += evaluate(sparse["rows"])
    if targets:
        found["targets"] = targets_table(targets)
    return found


PAGE = Page(REPOSITORY / "docs" / "attention-performance.md", sections)

if __name__ == "__main__":
    sys.exit(PAGE.main(__doc__))
