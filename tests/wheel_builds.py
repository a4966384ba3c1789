"""Building the three wheels from copies of the checkout."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "piper-kernels": "piper_kernels",
    "phyai-quant": "phyai_quant",
    "phyai-engine": "phyai",
}


def find_uv() -> str:
    """Return the uv that scripts/test uses, or skip the tests that need one."""
    private = ROOT / ".cache" / "uv" / "bin" / "uv"
    found = os.environ.get("UV") or shutil.which("uv") or (private.exists() and str(private))
    if not found:
        pytest.skip("uv is neither on PATH nor in .cache/uv: run scripts/test")
    return found


EPOCH = "1700000000"
FILES_OF_A_PACKAGE = ("src", "pyproject.toml", "README.md", "LICENSE")


def copy_checkout(tree: Path, *, modified: float) -> None:
    """Copy what builds need.

    Args:
        tree: Where the copy goes.
        modified: Time stamp of all its files.
    """
    tree.mkdir()
    shutil.copy(ROOT / "pyproject.toml", tree)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in PACKAGES:
        folder = tree / "packages" / name
        folder.mkdir(parents=True)
        for part in FILES_OF_A_PACKAGE:
            source = ROOT / "packages" / name / part
            copy = shutil.copy if source.is_file() else partial(shutil.copytree, ignore=ignored)
            copy(source, folder / part)
    for path in tree.rglob("*"):
        os.utime(path, (modified, modified))


def leave_caches(tree: Path) -> None:
    """Leave in every package what running and testing it leaves there."""
    for name, package in PACKAGES.items():
        folder = tree / "packages" / name
        for file in (
            f"src/{package}/__pycache__/module.cpython-312.pyc",
            ".hypothesis/constants/1",
            ".pytest_cache/README.md",
            "benchmarks/results/times.json",
            "dist/old.whl",
            "tests/test_module.py",
        ):
            (folder / file).parent.mkdir(parents=True)
            (folder / file).write_text("old\n")


def build(tree: Path, *options: str, out: str = "dist") -> dict[str, Path]:
    """Build every wheel and source archive of a copy of the checkout; return them by name.

    A wheel is built from its source archive, or with ``--wheel`` from the tree itself.
    """
    command = [find_uv(), "build", "--all-packages", "--no-sources", "--out-dir", tree / out]
    built = subprocess.run(
        [*command, *options, "--python", sys.executable],
        cwd=tree,
        env=os.environ | {"SOURCE_DATE_EPOCH": EPOCH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return {path.name: path for path in (tree / out).iterdir() if path.suffix in {".whl", ".gz"}}


def by_package(files: Iterable[Path], suffix: str) -> dict[str, Path]:
    found = {
        path.name.split("-")[0].replace("_", "-"): path for path in files if path.suffix == suffix
    }
    assert found.keys() == PACKAGES.keys()
    return found


def differing(some: dict[str, Path], others: dict[str, Path]) -> list[str]:
    return [name for name in some if some[name].read_bytes() != others[name].read_bytes()]
