"""Pages of ``docs`` whose marked parts are written from stored results."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from _report import RESULTS, replace_table, say

FOLDER = RESULTS / "nvidia-h200"
MISSING = "No run is stored yet."
VERDICTS = {True: "reached", False: "missed", None: "not measured"}
"""Of a target, by whether it was met."""


@dataclass(frozen=True)
class Page:
    """A page and where its parts come from.

    Attributes:
        path: The page.
        sections: Returns the content of every marked part from a folder of results.
    """

    path: Path
    sections: Callable[[Path], dict[str, str]]

    def render(self, text: str, folder: Path = FOLDER) -> str:
        """Return the text of the page with its marked parts replaced."""
        for name, content in self.sections(folder).items():
            text = replace_table(text, name, content)
        return text

    def main(self, documentation: str | None, arguments: Sequence[str] | None = None) -> int:
        """Write or check the page as the command line says; return the exit status."""
        parser = argparse.ArgumentParser(description=(documentation or "").splitlines()[0])
        parser.add_argument("--check", action="store_true", help="write nothing")
        options = parser.parse_args(arguments)
        text = self.path.read_text(encoding="utf-8")
        rendered = self.render(text)
        if options.check:
            same = text == rendered
            say(f"{self.path} {'shows' if same else 'differs from'} the results in {FOLDER}")
            return int(not same)
        self.path.write_text(rendered, encoding="utf-8")
        return 0


def stored(folder: Path, name: str) -> dict | None:
    """Return the stored result of a benchmark, ``None`` where there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def environment_line(result: dict) -> str:
    """Return device, clocks, versions and commit of a result in one paragraph."""
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    clocks = result.get("clocks", {})
    speed = ", ".join(
        clocks[name] for name in ("clocks.sm", "clocks.mem", "driver_version") if name in clocks
    )
    device = result["device"] + (f" ({speed})" if speed else "")
    return f"{device}; {versions}; commit {result['commit']}."


def tables_by_case(rows: list[dict], table: Callable[[list[dict]], str]) -> str:
    """Return a heading and a table for every case."""
    return "\n\n".join(
        f"### {name}\n\n{table(list(group))}"
        for name, group in groupby(rows, key=lambda row: row["case"])
    )
