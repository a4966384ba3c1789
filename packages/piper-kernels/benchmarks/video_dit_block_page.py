"""Write the tables of ``docs/video-dit-performance.md`` from stored results.

    python video_dit_block_page.py [--check]

``--check`` writes nothing and fails where the page differs from the results.
"""

import sys
from pathlib import Path

from _linear_tables import number
from _pages import MISSING, VERDICTS, Page, environment_line, stored, tables_by_case
from _report import REPOSITORY, table
from benchmark_video_dit_block import LABELS, block_table


def targets_table(targets: list[dict]) -> str:
    """Return the table of targets: a line for each."""
    lines = [
        [LABELS[t["provider"]], t["tokens"], f"≥ {t['target']} ×", number(t["times_bf16"]),
         VERDICTS[t["met"]]]
        for t in targets
    ]  # fmt: skip
    return table(["block", "tokens", "target", "measured", "result"], lines)


def sections(folder: Path) -> dict[str, str]:
    """Return the content of every marked part of the page."""
    names: list[str] = ["environment", "targets", "lengths"]
    found = dict.fromkeys(names, MISSING)
    if result := stored(folder, "video_dit_block"):
        found["environment"] = environment_line(result)
        found["targets"] = targets_table(result["targets"])
        found["lengths"] = tables_by_case(result["rows"], block_table)
    return found


PAGE = Page(REPOSITORY / "docs" / "video-dit-performance.md", sections)

if __name__ == "__main__":
    sys.exit(PAGE.main(__doc__))
