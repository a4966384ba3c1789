"""Write the tables of ``docs/linear-performance.md`` from stored results.

    python linear_page.py [--check]

``--check`` writes nothing and fails where the page differs from the results.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from _linear_tables import linear_table, preparation_table, targets_table
from _report import REPOSITORY, RESULTS, replace_table, say
from benchmark_ffn import ffn_table

PAGE = REPOSITORY / "docs" / "linear-performance.md"
FOLDER = RESULTS / "nvidia-h200"
MISSING = "No run is stored yet."


def environment_line(result: dict) -> str:
    """Return device, clocks, versions and commit of a result in one paragraph."""
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    clocks = result.get("clocks", {})
    speed = ", ".join(
        clocks[name] for name in ("clocks.sm", "clocks.mem", "driver_version") if name in clocks
    )
    device = result["device"] + (f" ({speed})" if speed else "")
    return f"{device}; {versions}; commit {result['commit']}."


def _by_case(rows: list[dict]) -> list[tuple[str, list[dict]]]:
    return [(name, list(group)) for name, group in groupby(rows, key=lambda row: row["case"])]


def sections(folder: Path) -> dict[str, str]:
    """Return the content of every marked part of the page."""

    def load(name: str) -> dict | None:
        path = folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    names: list[str] = ["environment", "targets", "preparation", "linears", "ffn", "block"]
    found = dict.fromkeys(names, MISSING)
    linear, ffn, block = load("linear"), load("ffn"), load("block")
    if linear is not None:
        found["environment"] = environment_line(linear)
        found["targets"] = targets_table(linear["targets"])
        found["preparation"] = preparation_table(linear["rows"])
        found["linears"] = "\n\n".join(
            f"### {name}\n\n{linear_table(rows)}" for name, rows in _by_case(linear["rows"])
        )
    for name, result in (("ffn", ffn), ("block", block)):
        if result is not None:
            tables = [f"### {case}\n\n{ffn_table(rows)}" for case, rows in _by_case(result["rows"])]
            found[name] = "\n\n".join([environment_line(result), *tables])
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
