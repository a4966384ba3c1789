"""Measure quantized linears beside bf16, cuBLAS INT8, FP8, torchao and Humming.

    python benchmark_linear.py [--quick] [--providers NAME ...] [--cases TEXT ...]
        [--budget SECONDS] [--processes NUMBER] [--json FILE] [--commit HASH]

Every case prints, for each provider, the preparation of the input, the product and the whole
operation, beside the quality of the result. A result that is wrong is not timed and makes the
exit status 1. A GPU run of all cases stores ``results/<device>/linear.json``, from which
``linear_page.py`` writes ``docs/linear-performance.md``. The file is written after every case,
so a run that is stopped keeps what it measured. On a GPU processes beside each other first compile
the kernels of all cases, which is most of the time; the budget counts from there. Without a GPU
it is a dry run.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _graph_timing import Variant, time_variants
from _harness import (
    WrongResultError,
    choose_cases,
    device,
    environment,
    kernels_by_run,
    require_as_exact,
)
from _linear_cases import FULL, QUICK, LinearCase
from _linear_compilation import compile_ahead, compile_share
from _linear_operands import CHECKED_ROWS, Operands, copy_variant, exact_rows, make_operands
from _linear_providers import PROVIDERS, Operator, Provider
from _linear_tables import linear_table, targets_table
from _linear_targets import evaluate
from _quality import quality
from _report import result_path, say, write_json
from torch import Tensor

SCHEMA = 1
HOST_REPEATS, HOST_CALLS = 3, 20
PHASES = ("preparation", "product", "total")


def check(
    provider: Provider, operator: Operator, case: LinearCase, operands: Operands, exact: Tensor
) -> dict:
    """Return the quality of the first rows of a result.

    Raises:
        WrongResultError: It is worse than the format allows, or than its reference by over 5 %.
    """
    x = operands.inputs[0]
    actual = operator.linear(x)
    if actual.shape != (case.m, case.n) or actual.dtype != x.dtype:
        raise WrongResultError(f"{provider.label}: {actual.dtype} {tuple(actual.shape)}")
    found = quality(actual[:CHECKED_ROWS], exact)
    sqnr = found["sqnr_db"]
    if found["nonfinite"] or (sqnr is not None and sqnr < provider.minimum_sqnr):
        raise WrongResultError(
            f"{provider.label}: {found['nonfinite']} values not finite, SQNR {sqnr} dB, "
            f"at least {provider.minimum_sqnr} dB expected; not timed"
        )
    if operator.reference is not None:
        # A second scale level is one for the whole input, so the reference sees all of it.
        reference = operator.reference(x if case.m <= 1024 else x[:CHECKED_ROWS])
        rows = actual if case.m <= 1024 else operator.linear(x[:CHECKED_ROWS])
        require_as_exact(
            provider.label, rows[:CHECKED_ROWS], reference[:CHECKED_ROWS], exact.float()
        )
    return found


def variants_of(provider: Provider, case: LinearCase, operands: Operands) -> dict[str, Variant]:
    """Return what is timed of a provider, by phase, with a weight for every operand set."""
    sets = min(case.sets(provider.weight_bits), len(operands.inputs))
    operators = [provider.build(case, operands.weight.clone(), operands.bias) for _ in range(sets)]
    inputs = operands.inputs
    variants = {"total": Variant(lambda index: operators[index].linear(inputs[index]), sets)}
    first = operators[0]
    if first.prepare is not None and first.multiply is not None:
        prepare, products = first.prepare, [operator.multiply for operator in operators]
        prepared = [prepare(x) for x in inputs[:sets]]

        def multiply(index: int) -> Tensor:
            product = products[index]
            assert product is not None
            return product(prepared[index])

        variants["preparation"] = Variant(lambda index: prepare(inputs[index]), sets)
        variants["product"] = Variant(multiply, sets)
    return variants


def host_microseconds(run: Callable[[], object]) -> float | None:
    """Return what the host takes to enqueue a call outside graphs, while the GPU is behind."""
    if device().type != "cuda":
        return None
    times = []
    for _ in range(HOST_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            run()
        times.append(1e6 * (time.perf_counter() - start) / HOST_CALLS)
    torch.cuda.synchronize()
    return min(times)


def measure(case: LinearCase, names: Sequence[str]) -> list[dict]:
    """Check and time a case; one row for each provider.

    Returns:
        Rows with ``case``, ``provider`` and either ``skipped``, ``error``, or the times by
        phase, ``tops``, ``product_tops``, ``times_bf16``, ``of_copy`` and the quality.
    """
    operands = make_operands(case)
    exact = exact_rows(case, operands)
    rows: list[dict] = []
    variants: dict[str, Variant] = {"copy": copy_variant(case)}
    checked: dict[str, Callable[[], object]] = {}
    for name in (name for name in case.providers if name in names):
        provider = PROVIDERS[name]
        row: dict[str, Any] = {"case": case.name, "m": case.m, "n": case.n, "k": case.k}
        row |= {"group": case.group, "activation": case.activation, "provider": name}
        rows.append(row)
        reason = provider.refusal(case, device())
        if reason:
            row["skipped"] = reason
            continue
        try:
            operator = provider.build(case, operands.weight, operands.bias)
            row |= check(provider, operator, case, operands, exact)
            checked[name] = lambda run=operator.linear: run(operands.inputs[0])
            row["host_us"] = host_microseconds(lambda run=operator.linear: run(operands.inputs[0]))
            found = variants_of(provider, case, operands)
        except Exception as error:  # a provider that fails must not stop the others
            row["error"] = f"{type(error).__name__}: {error}"[:400]
            continue
        row["sets"] = found["total"].sets
        variants |= {f"{name} {phase}": variant for phase, variant in found.items()}
    kernels = kernels_by_run(checked, device())
    times = time_variants(variants)
    baseline = times.get("bf16 total", {}).get("ms")
    for row in rows:
        if row["provider"] in kernels:
            row["kernels"] = kernels[row["provider"]]
        _add_times(row, case, times, baseline)
    return rows


def _add_times(row: dict, case: LinearCase, times: dict[str, dict], baseline: float | None) -> None:
    found = {phase: times.get(f"{row['provider']} {phase}") for phase in PHASES}
    total = found["total"]
    if total is None:
        return
    if "error" in total:
        row["error"] = total["error"]
        return
    row["phases"] = {phase: value for phase, value in found.items() if value}
    row["tops"] = case.operations / total["ms"] / 1e9
    row["times_bf16"] = baseline / total["ms"] if baseline else None
    product = row["phases"].get("product", {}).get("ms")
    row["product_tops"] = case.operations / product / 1e9 if product else None
    preparation, copy = (row["phases"].get("preparation", {}).get("ms"), times["copy"].get("ms"))
    if row["provider"] == "piper_int8" and preparation and copy:
        row["copy_ms"], row["of_copy"] = copy, copy / preparation
        row["preparation_gbps"] = case.preparation_bytes / preparation / 1e6


def run(
    cases: Sequence[LinearCase],
    names: Sequence[str],
    *,
    budget: float,
    store: Callable[[list[dict], list[str]], None],
) -> tuple[list[dict], list[str]]:
    """Measure cases until the budget is over.

    Args:
        cases: What to measure, in order.
        names: Providers that take part.
        budget: Seconds after which no case is started.
        store: Called after every case with the rows so far and the names of cases left.

    Returns:
        Rows, and the names of cases that were not started.
    """
    start, rows, left = time.perf_counter(), [], [case.name for case in cases]
    for case in cases:
        began = time.perf_counter()
        if began - start > budget:
            break
        with torch.no_grad():
            found = measure(case, names)
        if device().type == "cuda":
            torch.cuda.empty_cache()
        rows += found
        left.remove(case.name)
        store(rows, left)
        say(f"\n{case.name} ({time.perf_counter() - began:.1f} s)\n{linear_table(found)}")
    return rows, left


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print and store; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, a dry run")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--cases", nargs="+", help="only cases whose names contain a text")
    parser.add_argument("--budget", type=float, default=75, help="seconds (default 75)")
    parser.add_argument("--processes", type=int, default=6, help="that compile (default 6)")
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--commit", help="commit to record where there is no git history")
    options = parser.parse_args(arguments)
    quick = options.quick or device().type != "cuda"
    cases = choose_cases(QUICK if quick else FULL, options.cases)
    if options.share is not None:
        with torch.no_grad():
            compile_share(cases[options.share[0] :: options.share[1]], options.providers)
        return 0
    if not quick and options.processes > 0:
        given = sys.argv[1:] if arguments is None else arguments
        compile_ahead(options.processes, [__file__, *given])
    facts = environment(quick=quick, revision=options.commit)
    say("\n".join(f"{name}: {value}" for name, value in facts.items()))
    path = options.json
    if path is None and not quick and not options.cases:
        # Committed results have all providers.
        complete = len(options.providers) == len(PROVIDERS)
        path = result_path(facts, "linear") if complete else None

    def store(rows: list[dict], left: list[str]) -> None:
        result = {"schema": SCHEMA} | facts | {"rows": rows, "not_started": left}
        result["targets"] = evaluate(rows)
        if path is not None:
            write_json(path, json.loads(json.dumps(result)))

    rows, late = run(cases, options.providers, budget=options.budget, store=store)
    say(f"\n{targets_table(evaluate(rows))}")
    failed = [f"{row['case']} {row['provider']}: {row['error']}" for row in rows if "error" in row]
    failed += [f"{name}: not started, the budget was over" for name in late]
    for line in failed:
        say(f"failed: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
