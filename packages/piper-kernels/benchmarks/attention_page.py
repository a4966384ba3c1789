"""Write the tables of ``docs/attention-performance.md`` from stored results.

    python attention_page.py [--check]

``--check`` writes nothing and fails where the page differs from the results.
"""

import sys
from pathlib import Path

from _attention_tables import attention_table, quality_table, targets_table
from _pages import MISSING, Page, environment_line, stored, tables_by_case
from _report import REPOSITORY


def sections(folder: Path) -> dict[str, str]:
    """Return the content of every marked part of the page."""
    names: list[str] = ["environment", "targets", "dense", "quality"]
    names += ["sparse environment", "sparse"]
    found = dict.fromkeys(names, MISSING)
    targets = []
    if dense := stored(folder, "attention"):
        found["environment"] = environment_line(dense)
        found["dense"] = tables_by_case(dense["rows"], attention_table)
        found["quality"] = quality_table(dense["quality"])
        targets += dense["targets"]
    if sparse := stored(folder, "sparse_attention"):
        found["sparse environment"] = environment_line(sparse)
        found["sparse"] = tables_by_case(sparse["rows"], attention_table)
        if sparse.get("quality"):
            found["sparse"] += f"\n\n### Quality\n\n{quality_table(sparse['quality'])}"
        targets += sparse["targets"]
    if targets:
        found["targets"] = targets_table(targets)
    return found


PAGE = Page(REPOSITORY / "docs" / "attention-performance.md", sections)

if __name__ == "__main__":
    sys.exit(PAGE.main(__doc__))
