"""Check that users' type checkers know the public types of each wheel.

    python scripts/check_types.py [--least PERCENT] [PACKAGE ...]

Pyright counts the public names, methods and attributes whose types it need not infer; types that
come from other packages without annotations are not held against us. Lists the others, and fails
below 95 %. Takes about 30 s.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("piper_kernels", "phyai_quant", "phyai")
LEAST = 95.0


@dataclass(frozen=True)
class Completeness:
    """What Pyright found about one package.

    Attributes:
        package: its import name.
        known: number of public symbols whose type is stated.
        unstated: a line for each of the others: its name, and why.
    """

    package: str
    known: int
    unstated: tuple[str, ...]

    @property
    def percent(self) -> float:
        """Share of the symbols whose type is stated."""
        return 100 * self.known / (self.known + len(self.unstated))

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> "Completeness":
        """Return the findings in Pyright's JSON.

        Raises:
            ValueError: Pyright saw no public symbol of the package, with what it says of it.
        """
        found = document["typeCompleteness"]
        symbols = [symbol for symbol in found["symbols"] if symbol["isExported"]]
        if not symbols:
            said = "; ".join(d["message"] for d in document["generalDiagnostics"])
            raise ValueError(f"pyright found no public symbol of {found['packageName']}: {said}")
        unstated = tuple(_line(symbol) for symbol in symbols if not _stated(symbol))
        return cls(found["packageName"], len(symbols) - len(unstated), unstated)


def _stated(symbol: Mapping[str, Any]) -> bool:
    return symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"]


def _line(symbol: Mapping[str, Any]) -> str:
    reasons = [d["message"].splitlines()[0] for d in symbol["diagnostics"]]
    return f"{symbol['name']}: {reasons[0] if reasons else 'has a part whose type is not stated'}"


def measure(package: str) -> Completeness:
    """Return what Pyright finds about a package of this interpreter's environment.

    Raises:
        ValueError: the package is not installed here, or has no ``py.typed``.
    """
    environment = dict(os.environ)
    # Pyright takes the first Python of the path; inside a checkout it would see files, no package.
    folder = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([folder, environment.get("PATH", "")])
    command = [sys.executable, "-m", "pyright", "--verifytypes", package]
    with tempfile.TemporaryDirectory() as empty:
        result = subprocess.run(
            [*command, "--ignoreexternal", "--outputjson"],
            cwd=empty,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if not result.stdout.lstrip().startswith("{"):
        raise ValueError(f"pyright: {result.stderr.strip() or result.stdout.strip()}")
    return Completeness.read(json.loads(result.stdout))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and return 1 if a package is below the bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", default=PACKAGES)
    parser.add_argument("--least", type=float, default=LEAST, help="percent (default 95)")
    options = parser.parse_args(arguments)
    failed = []
    for package in options.packages:
        found = measure(package)
        print(f"{package}: {found.percent:.1f} % of {found.known + len(found.unstated)} stated")
        for line in found.unstated:
            print(f"  {line}")
        if found.percent < options.least:
            failed.append(package)
    if failed:
        print(f"error: below {options.least:g} %: {', '.join(failed)}; annotate the names above")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
