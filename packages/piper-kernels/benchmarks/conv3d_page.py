"""Write the tables of ``docs/conv3d-performance.md`` from stored results.

    python conv3d_page.py [--check]

``--check`` writes nothing and fails where the page differs from the results.
"""

import sys
from pathlib import Path

from _linear_tables import number
from _pages import MISSING, VERDICTS, Page, environment_line, stored, tables_by_case
from _report import REPOSITORY, table
from benchmark_convrot_int8_conv3d import conv3d_table


def targets_table(targets: list[dict]) -> str:
    """Return the table of targets: a line for each case."""
    lines = [
        [t["case"], f"≥ {t['target']} ×", number(t["times_fp16"]), VERDICTS[t["met"]]]
        for t in targets
    ]
    return table(["convolution", "target", "measured", "result"], lines)


def sections(folder: Path) -> dict[str, str]:
    """Return the content of every marked part of the page."""
    names: list[str] = ["environment", "targets", "cases"]
    found = dict.fromkeys(names, MISSING)
    if result := stored(folder, "conv3d"):
        found["environment"] = environment_line(result)
        found["targets"] = targets_table(result["targets"])
        found["cases"] = tables_by_case(result["rows"], conv3d_table)
    return found


PAGE = Page(REPOSITORY / "docs" / "conv3d-performance.md", sections)

if __name__ == "__main__":
    sys.exit(PAGE.main(__doc__))
