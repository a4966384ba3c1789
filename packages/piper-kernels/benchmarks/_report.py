"""Where results go: versions of what ran, JSON files, and tables inside Markdown pages."""

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
REPOSITORY = HERE.parents[2]
_LIBRARIES = ("torch", "triton", "torchao", "piper-kernels", "numpy", "gguf")


def versions() -> dict[str, str]:
    """Return the version of Python and of every library that a result depends on."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    return found


def commit() -> str:
    """Return the commit of the checkout, with ``-dirty`` when sources differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(  # noqa: S603
            ["git", *arguments],  # noqa: S607
            cwd=HERE,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(HERE.parent))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def say(text: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(f"{text}\n")


def write_json(path: Path, result: dict) -> None:
    """Write a result, and its folder where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def result_path(facts: dict, name: str, folder: Path = RESULTS) -> Path:
    """Return where the result of a benchmark on a device goes."""
    return folder / str(facts["device"]).lower().replace(" ", "-") / f"{name}.json"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; floats show two decimals, ``None`` an en dash."""

    def cell(value: object) -> str:
        if value is None:
            return "–"
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def replace_table(page: str, name: str, content: str) -> str:
    """Return a page whose part between the markers of ``name`` is ``content``.

    Raises:
        ValueError: The page has no such markers.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if begin not in page or end not in page:
        raise ValueError(f"the page has no markers {begin!r} and {end!r}")
    head, rest = page.split(begin, 1)
    tail = rest.split(end, 1)[1]
    return f"{head}{begin}\n{content}\n{end}{tail}"
