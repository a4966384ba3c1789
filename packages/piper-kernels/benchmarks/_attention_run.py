"""What the two attention benchmarks share: timing of providers in turns and the command line."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from _attention_cases import AttentionCase, SparseCase
from _attention_phases import profile_call
from _attention_tables import targets_table
from _attention_targets import evaluate
from _graph_timing import Variant, time_variants
from _harness import choose_cases, device, environment
from _report import result_path, say, write_json
from torch import Tensor

SCHEMA = 1
SETS = 2
THREADS = 12


def time_rows(
    rows: Sequence[dict], runs: Mapping[str, Sequence[Callable[[], Tensor]]], operations: int
) -> None:
    """Time providers in turns and add the times to their rows.

    Args:
        rows: One for each provider, with ``provider``; those without an entry of ``runs`` stay.
        runs: By provider, a call for every set of operands.
        operations: Operations of a dense call, for ``tops``.
    """
    variants = {
        name: Variant(lambda index, calls=calls: calls[index](), len(calls))
        for name, calls in runs.items()
    }
    times = time_variants(variants, sustained=True)
    baseline = times.get("cudnn", {})
    for row in rows:
        found = times.get(row["provider"])
        if found is None:
            continue
        row.update(found)
        if "error" in found:
            continue
        row["tops"] = operations / found["ms"] / 1e9
        for field, of in (("ms", "times_cudnn"), ("sustained_ms", "sustained_times_cudnn")):
            row[of] = baseline[field] / found[field] if field in baseline else None
        row["phases"], row["kernels"] = profile_call(runs[row["provider"]][0])


def compile_in_threads(calls: Sequence[Callable[[], object]]) -> None:
    """Make calls at the same time, so that their kernels are compiled before they are measured.

    A call that fails is ignored: it fails again where it is measured.
    """

    def make(call: Callable[[], object]) -> None:
        with torch.no_grad(), suppress(Exception):
            call()

    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(make, calls))
    if device().type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    say(f"compiled ({time.perf_counter() - began:.1f} s)")
    sys.stdout.flush()


def parser_of(
    documentation: str, providers: Sequence[str], budget: float
) -> argparse.ArgumentParser:
    """Return the command line of a benchmark; the budget includes compiling."""
    parser = argparse.ArgumentParser(description=documentation.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, a dry run")
    parser.add_argument("--providers", nargs="+", choices=providers, default=list(providers))
    parser.add_argument("--cases", nargs="+", help="only cases whose names contain a text")
    parser.add_argument("--budget", type=float, default=budget, help=f"seconds (default {budget})")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--commit", help="commit to record where there is no git history")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a run; ``quick`` on the CPU, ``complete`` if it may be stored."""
    options = parser.parse_args(arguments)
    options.quick = options.quick or device().type != "cuda"
    every = set(options.providers) == set(parser.get_default("providers"))
    options.complete = every and not options.quick and not options.cases
    return options


def chosen[C: (AttentionCase, SparseCase)](
    options: argparse.Namespace, full: Sequence[C], quick: Sequence[C]
) -> list[C]:
    """Return the cases of a run.

    Raises:
        SystemExit: There are none.
    """
    return choose_cases(quick if options.quick else full, options.cases)


def run_cases[C: (AttentionCase, SparseCase)](
    cases: Sequence[C], measure: Callable[[C], list[dict]], show: Callable[[list[dict]], str],
    *, start: float, budget: float,
) -> tuple[list[dict], list[str]]:  # fmt: skip
    """Measure cases until ``budget`` seconds after ``start``; rows, and cases not started."""
    rows, late = [], []
    for case in cases:
        began = time.perf_counter()
        if began - start > budget:
            late.append(case.name)
            continue
        with torch.no_grad():
            found = measure(case)
        if device().type == "cuda":
            torch.cuda.empty_cache()
        rows += found
        say(f"\n{case.name} ({time.perf_counter() - began:.1f} s)\n{show(found)}")
        sys.stdout.flush()
    return rows, late


def finish(
    options: argparse.Namespace, name: str, result: dict[str, Any], ours: Sequence[str]
) -> int:
    """Add facts and targets, print and store the result; return the exit status.

    Errors of others are shown only; an error of ``ours`` or a case that was not started fails.
    """
    facts = environment(quick=options.quick, revision=options.commit)
    result = {"schema": SCHEMA} | facts | result
    result["targets"] = evaluate(result["rows"])
    say("\n" + "\n".join(f"{key}: {value}" for key, value in facts.items()))
    say(f"\n{targets_table(result['targets'])}")
    path = options.json
    if path is None and options.complete:
        path = result_path(facts, name)
    if path is not None:
        write_json(path, json.loads(json.dumps(result)))
    failed = []
    for row in [*result["rows"], *result.get("quality", [])]:
        if "error" in row:
            line = f"{row['case']} {row['provider']}: {row['error']}"
            say(f"failed: {line}")
            failed += [line] if row["provider"] in ours else []
    for case in result["not_started"]:
        say(f"failed: {case}: not started, the budget was over")
    return 1 if failed or result["not_started"] else 0
