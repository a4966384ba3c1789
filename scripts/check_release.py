"""Check that a wheel's metadata, its changelog and, for a release, its tag name one version.

    python scripts/check_release.py WHEEL [--tag TAG]

With a tag the changelog must head the version with its date, ``## 0.1.0 (2026-11-30)``; before,
``## Unreleased (0.1.0)`` will do. What the three wheels require of each other must include their
present versions.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ("piper-kernels", "phyai-quant", "phyai-engine")


def project(root: Path, wheel: str) -> dict[str, Any]:
    """Return the ``[project]`` table of a wheel."""
    return tomllib.loads((root / "packages" / wheel / "pyproject.toml").read_text())["project"]


def heading_fault(changelog: str, version: str, *, released: bool) -> str | None:
    """Return what is wrong with the first heading of a changelog, or None."""
    found = re.search(r"^## (.+)$", changelog, re.MULTILINE)
    heading = found[1] if found else "none"
    number = re.escape(version)
    if re.fullmatch(rf"{number} \(\d{{4}}-\d{{2}}-\d{{2}}\)", heading):
        return None
    if not released and re.fullmatch(rf"Unreleased \({number}\)", heading):
        return None
    wanted = f"'{version} (YYYY-MM-DD)'"
    if not released:
        wanted += f" or 'Unreleased ({version})'"
    return f"the first heading of the changelog is '{heading}', not {wanted}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def requirement_faults(root: Path, wheel: str) -> list[str]:
    """Return the requirements of a wheel that exclude another wheel of this tree.

    Understands the form ``name[extras]>=A,<B`` in which the wheels require each other.
    """
    faults = []
    for line in project(root, wheel).get("dependencies", []):
        name = re.split(r"[\[<>=;!~ ]", line, maxsplit=1)[0]
        if name not in WHEELS:
            continue
        present = project(root, name)["version"]
        bounds = re.fullmatch(rf"{name}(?:\[[\w,-]+\])?>=([\d.]+),<([\d.]+)", line)
        if bounds is None:
            faults.append(f"'{line}' is not of the form {name}>=A,<B")
        elif not _numbers(bounds[1]) <= _numbers(present) < _numbers(bounds[2]):
            faults.append(f"'{line}' excludes {name} {present}")
    return faults


def faults(root: Path, wheel: str, tag: str | None) -> list[str]:
    """Return a line for everything that keeps a wheel from being released."""
    version = project(root, wheel)["version"]
    found = requirement_faults(root, wheel)
    if tag is not None and tag != f"{wheel}-v{version}":
        found.append(f"the tag is '{tag}', not '{wheel}-v{version}'")
    changelog = (root / "packages" / wheel / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = heading_fault(changelog, version, released=tag is not None)
    return [*found, heading] if heading else found


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Check one wheel, print what is wrong and return 1 if anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", choices=WHEELS)
    parser.add_argument("--tag", help="the tag of the release; left out before there is one")
    options = parser.parse_args(arguments)
    found = faults(root, options.wheel, options.tag)
    for line in found:
        print(f"error: {options.wheel}: {line}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
