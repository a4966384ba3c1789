"""Write the tables of ``docs/linear-performance.md`` from stored results.

    python linear_page.py [--check]

``--check`` writes nothing and fails where the page differs from the results.
"""

import sys
from pathlib import Path

from _linear_tables import linear_table, preparation_table, targets_table
from _pages import MISSING, Page, environment_line, stored, tables_by_case
from _report import REPOSITORY
from benchmark_ffn import ffn_table


def sections(folder: Path) -> dict[str, str]:
    """Return the content of every marked part of the page."""
    names: list[str] = ["environment", "targets", "preparation", "linears", "ffn", "block"]
    found = dict.fromkeys(names, MISSING)
    if linear := stored(folder, "linear"):
        found["environment"] = environment_line(linear)
        found["targets"] = targets_table(linear["targets"])
        found["preparation"] = preparation_table(linear["rows"])
        found["linears"] = tables_by_case(linear["rows"], linear_table)
    for name in ("ffn", "block"):
        if result := stored(folder, name):
            tables = tables_by_case(result["rows"], ffn_table)
            found[name] = f"{environment_line(result)}\n\n{tables}"
    return found


PAGE = Page(REPOSITORY / "docs" / "linear-performance.md", sections)

if __name__ == "__main__":
    sys.exit(PAGE.main(__doc__))
