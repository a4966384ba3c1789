"""Measure projections to quantized attention operands beside separate operators.

    python benchmark_convrot_int8_projection.py [--quick] [--cases TEXT ...] [--budget SECONDS]
        [--json FILE] [--commit HASH]

Linears, normalization, rotary embedding, summaries and quantization of queries, keys and values of
one prepared input. Separate operators are ConvRot INT8 linears in bfloat16, Inductor for what lies
between, and the preparation of sparse attention. The attention of the operands of both is compared
with each other first, on a short sequence of the same heads; a wrong provider is not timed.
A GPU run of all cases stores ``results/<device>/projection.json``. Without a GPU it is a dry run.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _graph_timing import Variant, time_variants
from _harness import WrongResultError, choose_cases, device, environment, relative_error
from _linear_tables import number
from _projection_cases import FULL, LABELS, QUICK, ProjectionCase, Projections
from _report import result_path, say, table, write_json

SCHEMA = 1
SETS = 2
CHECKED_ROWS = 2048
MOST_ERROR = 0.025
# Projections of a provider that are not all three.
PARTS = ("query", "key", "value", "product")


def check(case: ProjectionCase) -> dict[str, float]:
    """Return the relative errors of providers against separate operators.

    Raises:
        WrongResultError: One is 2.5 % or more.
    """
    short = Projections(replace(case, rows=min(case.rows, CHECKED_ROWS)), device(), 1)
    expected = short.attention("unfused")
    assert expected is not None, "separate operators give all operands"
    errors = {}
    for name in LABELS:
        output = short.attention(name)
        if output is None or name == "unfused":
            continue
        errors[name] = relative_error(output, expected)
        if not errors[name] < MOST_ERROR:
            raise WrongResultError(f"{LABELS[name]}: relative error {errors[name]:.4f}; not timed")
    return errors


def measure(case: ProjectionCase) -> list[dict]:
    """Check and time a case; one row for each provider."""
    errors = check(case)
    projections = Projections(case, device(), SETS)
    variants = {name: Variant(run, SETS) for name, run in projections.providers().items()}
    times = time_variants(variants)
    baseline = times["unfused"].get("ms")
    rows = []
    for name in LABELS:
        row: dict[str, Any] = {"case": case.name, "provider": name} | times[name]
        if name in errors:
            row["relative_l2"] = errors[name]
        if "ms" in row:
            count = 1 if name in PARTS else 3
            row["tops"] = count * case.operations / row["ms"] / 1e9
            if count == 3 and baseline:
                row["times_unfused"] = baseline / row["ms"]
        rows.append(row)
    return rows


def projection_table(rows: list[dict]) -> str:
    """Return the table of one case: a line for each provider."""
    header = ["provider", "ms", "p10–p90", "TOP/s of the products", "× unfused", "relative error"]
    lines = []
    for row in rows:
        label = LABELS[row["provider"]]
        if "ms" not in row:
            lines.append([label, row["error"], *[None] * 4])
            continue
        spread = f"{number(row['p10'])}–{number(row['p90'])}"
        ratio, error = row.get("times_unfused"), row.get("relative_l2")
        error = None if error is None else f"{error:.4f}"
        lines.append([label, number(row["ms"]), spread, number(row["tops"]), number(ratio), error])
    return table(header, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print and store; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, a dry run")
    parser.add_argument("--cases", nargs="+", metavar="TEXT", help="cases whose names contain it")
    parser.add_argument("--budget", type=float, default=40, help="seconds (default 40)")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--commit", help="commit to record where there is no git history")
    options = parser.parse_args(arguments)
    quick = options.quick or device().type != "cuda"
    cases = choose_cases(QUICK if quick else FULL, options.cases)
    facts = environment(quick=quick, revision=options.commit)
    say("\n".join(f"{name}: {value}" for name, value in facts.items()))
    path = options.json
    if path is None and not quick and not options.cases:
        path = result_path(facts, "projection")
    start, rows, failed = time.perf_counter(), [], []
    late = [case.name for case in cases]
    for case in cases:
        if time.perf_counter() - start > options.budget:
            break
        late.remove(case.name)
        try:
            with torch.inference_mode():
                found = measure(case)
        except Exception as error:  # a case that fails must not stop the others
            failed.append(f"{case.name}: {type(error).__name__}: {error}"[:400])
            continue
        rows += found
        failed += [f"{case.name} {r['provider']}: {r['error']}" for r in found if "error" in r]
        if path is not None:
            result = {"schema": SCHEMA} | facts | {"rows": rows, "not_started": late}
            write_json(path, json.loads(json.dumps(result)))
        say(f"\n{case.name}\n{projection_table(found)}")
        if device().type == "cuda":
            torch.cuda.empty_cache()
    failed += [f"{name}: not started, the budget was over" for name in late]
    for line in failed:
        say(f"failed: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
