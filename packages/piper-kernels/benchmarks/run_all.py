"""Run every ``bench_*.py`` of this folder and store one JSON file for each.

    python run_all.py [--quick] [--only NAME ...] [--out FOLDER] [--budget SECONDS]

Files go to ``results/<device>/<name>.json``. A dry run (``--quick``, and always on the CPU)
stores nothing unless ``--out`` is given. A benchmark whose result is wrong, or that fails, is
reported, stores nothing and makes the exit status 1; the others still run.
"""

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from _harness import device, environment, rows_table
from _report import HERE, RESULTS, result_path, say, write_json


def benchmark_names() -> list[str]:
    """Return the names of all benchmarks, ``bench_`` and suffix removed."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def run_all(
    names: Sequence[str],
    *,
    quick: bool,
    out: Path | None,
    budget: float,
    revision: str | None = None,
) -> list[str]:
    """Run benchmarks and return the names of those that failed or had no time left.

    Args:
        names: Benchmarks to run, in order.
        quick: Small shapes and few repeats.
        out: Folder for the results, or ``None`` to store nothing.
        budget: No benchmark starts later than this many seconds.
        revision: Commit to record where the checkout has no history.
    """
    facts = environment(quick=quick, revision=revision)
    say("\n".join(f"{name}: {value}" for name, value in facts.items()))
    start, failed = time.perf_counter(), []
    for name in names:
        began = time.perf_counter()
        if began - start > budget:
            say(f"\n{name}: not started, {budget:.0f} s are over")
            failed.append(name)
            continue
        try:
            result = importlib.import_module(f"bench_{name}").run(quick)
        except Exception:  # a broken benchmark must not stop the others
            say(f"\n{name}: FAILED\n{traceback.format_exc()}")
            failed.append(name)
            continue
        seconds = time.perf_counter() - began
        say(f"\n{name} ({seconds:.1f} s)\n{rows_table(result['rows'])}")
        if out is not None:
            path = result_path(facts, name, out)
            write_json(path, facts | {"seconds": seconds} | result)
    return failed


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, few repeats")
    parser.add_argument("--only", nargs="+", choices=benchmark_names(), metavar="NAME")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--budget", type=float, default=90, help="seconds (default 90)")
    parser.add_argument("--commit", help="commit to record where there is no git history")
    options = parser.parse_args()
    quick = options.quick or device().type != "cuda"
    failed = run_all(
        options.only or benchmark_names(),
        quick=quick,
        out=options.out or (None if quick else RESULTS),
        budget=options.budget,
        revision=options.commit,
    )
    if failed:
        say(f"\nfailed: {', '.join(failed)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
