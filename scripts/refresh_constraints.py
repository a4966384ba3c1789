"""Rewrite the exact dependency versions in pyproject.toml from the resolved uv.lock.

The constraints are the lock that this repository keeps: ``uv.lock`` itself spells out addresses
of package indexes and is not committed. Run it after ``uv lock --upgrade``; ``--check`` only
says whether the two agree.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^constraint-dependencies = \[.*?\]$", re.DOTALL | re.MULTILINE)


def locked_versions(lock_text: str) -> dict[str, str]:
    """Return the version of every third-party package of a uv.lock text.

    Workspace members (``editable`` and ``virtual`` sources) are left out.

    Raises:
        ValueError: when one package is locked at two versions, which one constraint cannot say.
    """
    versions: dict[str, str] = {}
    for package in tomllib.loads(lock_text)["package"]:
        if {"editable", "virtual", "directory"} & package["source"].keys():
            continue
        name, version = package["name"], package["version"]
        if versions.setdefault(name, version) != version:
            raise ValueError(
                f"uv.lock holds {name} at both {versions[name]} and {version}; "
                "narrow the dependency in its pyproject.toml so that one version remains"
            )
    return versions


def with_constraints(pyproject_text: str, versions: dict[str, str]) -> str:
    """Return ``pyproject_text`` with its constraint list replaced by ``versions``.

    Raises:
        ValueError: when the text has no ``constraint-dependencies`` list to replace.
    """
    if not BLOCK.search(pyproject_text):
        raise ValueError("pyproject.toml has no [tool.uv] constraint-dependencies list")
    lines = [f'    "{name}=={version}",' for name, version in sorted(versions.items())]
    block = "\n".join(["constraint-dependencies = [", *lines, "]"])
    return BLOCK.sub(lambda _: block, pyproject_text, count=1)


def main() -> int:
    """Rewrite or check the list; return 1 when a check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only, change nothing")
    options = parser.parse_args()
    pyproject = ROOT / "pyproject.toml"
    before = pyproject.read_text()
    versions = locked_versions((ROOT / "uv.lock").read_text())
    after = with_constraints(before, versions)
    if options.check:
        if before != after:
            print("constraints differ from uv.lock: run scripts/refresh_constraints.py")
        return int(before != after)
    pyproject.write_text(after)
    print(f"wrote {len(versions)} constraints")
    return 0


if __name__ == "__main__":
    sys.exit(main())
