"""Write the tables of ``docs/attention-performance.md`` from stored results.

    python attention_page.py [--check]

``--check`` writes nothing and fails where the page differs from the results.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from _attention_tables import attention_table, quality_table, targets_table
from _report import REPOSITORY, RESULTS, replace_table, say
from linear_page import MISSING, environment_line

PAGE = REPOSITORY / "docs" / "attention-performance.md"
FOLDER = RESULTS / "nvidia-h200"


def _cases(rows: list[dict]) -> str:
    return "\n\n".join(
        f"### {name}\n\n{attention_table(list(group))}"
        for name, group in groupby(rows, key=lambda row: row["case"])
    )


def sections(folder: Path) -> dict[str, str]:
    """Return the content of every marked part of the page."""
    names: list[str] = ["environment", "targets", "dense", "quality"]
    names += ["sparse environment", "sparse"]
    found = dict.fromkeys(names, MISSING)
    results = {}
    for name in ("attention", "sparse_attention"):
        path = folder / f"{name}.json"
        if path.exists():
            results[name] = json.loads(path.read_text(encoding="utf-8"))
    if results:
        targets = [entry for result in results.values() for entry in result["targets"]]
        found["targets"] = targets_table(targets)
    if "attention" in results:
        dense = results["attention"]
        found["environment"] = environment_line(dense)
        found["dense"] = _cases(dense["rows"])
        found["quality"] = quality_table(dense["quality"])
    if "sparse_attention" in results:
        sparse = results["sparse_attention"]
        found["sparse environment"] = environment_line(sparse)
        found["sparse"] = _cases(sparse["rows"])
    return found


def render(page: str, folder: Path = FOLDER) -> str:
    """Return the page with its marked parts replaced."""
    for name, content in sections(folder).items():
        page = replace_table(page, name, content)
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    page = PAGE.read_text(encoding="utf-8")
    rendered = render(page)
    if options.check:
        say("the page shows the stored results" if page == rendered else "the page differs")
        return int(page != rendered)
    PAGE.write_text(rendered, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
