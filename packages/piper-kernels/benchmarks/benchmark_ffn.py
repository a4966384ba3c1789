"""Measure feed-forward networks and a transformer block with quantized weights.

    python benchmark_ffn.py [--quick] [--providers NAME ...] [--block] [--budget SECONDS]
        [--json FILE] [--commit HASH]

Providers are the eager and the compiled network in bf16, the eager network with INT8 weights,
its fused operator, networks compiled with this package's options, and networks of the linears
of cuBLAS INT8, FP8, torchao and Humming. Each row has the time, the bytes of the weights, the
peak of memory that one call allocates above weights and input (its result included, the same
for all providers), and the distance to the exact result. Every network has an equal share of
the budget; providers that it does not reach are left out, ours come first. A full GPU run
stores ``results/<device>/ffn.json`` (``block.json`` with ``--block``), written after every
network, so a run that is stopped keeps what it measured. Without a GPU it is a dry run.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _ffn_models import BLOCKS, FULL, QUICK, QUICK_BLOCKS, FeedForwardCase, build
from _ffn_providers import LABELS, Run, minimum_sqnr, refusal, runners, stored_bytes
from _graph_timing import Variant, time_variants
from _harness import WrongResultError, device, environment, kernel_names
from _linear_tables import number
from _quality import quality
from _report import result_path, say, table, write_json
from torch import Tensor, nn

SCHEMA = 1
INPUTS = 2
EXACT_ROWS = 256


def peak_bytes(run: Run, x: Tensor) -> int | None:
    """Return the most memory that a call has allocated above what was allocated before."""
    if not x.is_cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run(x)
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def exact(case: FeedForwardCase, model: nn.Module, x: Tensor) -> Tensor:
    """Return the exact result of the first rows in FP32; of all rows where they mix."""
    import copy

    rows = x if case.kind == "block" else x[:, :EXACT_ROWS]
    return copy.deepcopy(model).float()(rows.float())


def measure(case: FeedForwardCase, names: Sequence[str], until: float | None = None) -> list[dict]:
    """Check and time a case; one row for each provider, in the order of ``LABELS``.

    Args:
        case: The network.
        names: Providers that take part.
        until: Reading of the clock after which no provider is started.
    """
    model = build(case, device())
    generator = torch.Generator(device()).manual_seed(1)
    inputs = [
        torch.randn(
            1, case.rows, case.width, generator=generator, device=device(), dtype=torch.bfloat16
        )
        for _ in range(INPUTS)
    ]
    expected = exact(case, model, inputs[0])
    rows, variants = [], {}
    for name, make in runners(case, model).items():
        if name not in names:
            continue
        row: dict[str, Any] = {"case": case.name, "kind": case.kind, "rows": case.rows}
        row |= {"provider": name}
        row["weight_bytes"] = stored_bytes(name, model)
        rows.append(row)
        reason = refusal(name, case, model)
        if until is not None and time.perf_counter() > until:
            reason = "the budget was over"
        if reason:
            row["skipped"] = reason
            continue
        try:
            began = time.perf_counter()
            run = make()
            actual = run(inputs[0])
            if actual.is_cuda:
                torch.cuda.synchronize()
            row["first_call_s"] = time.perf_counter() - began
            say(f"{case.name}, {LABELS[name]}: first call {row['first_call_s']:.1f} s")
            sys.stdout.flush()
            row |= _checked(name, case.kind, actual[:, : expected.shape[1]], expected)
            del actual
            row["peak_bytes"] = peak_bytes(run, inputs[0])
            row["kernels"] = kernel_names(lambda _i, run=run: run(inputs[0]), device())
        except Exception as error:  # a provider that fails must not stop the others
            row["error"] = f"{type(error).__name__}: {error}"[:400]
            continue
        variants[name] = Variant(lambda index, run=run: run(inputs[index]), INPUTS)
    times = time_variants(variants)
    for row in rows:
        found = times.get(row["provider"])
        if found is not None:
            row.update(found)
        if "ms" in row:
            row["tops"] = case.operations / row["ms"] / 1e9
            for base in ("bf16", "bf16_compiled"):
                ms = times.get(base, {}).get("ms")
                row[f"times_{base}"] = ms / row["ms"] if ms else None
    return rows


def _checked(name: str, kind: str, actual: Tensor, expected: Tensor) -> dict:
    found, least = quality(actual, expected), minimum_sqnr(name, kind)
    sqnr = found["sqnr_db"]
    if found["nonfinite"] or (sqnr is not None and sqnr < least):
        raise WrongResultError(f"{LABELS[name]}: {found}, {least} dB expected; not timed")
    return found


def ffn_table(rows: list[dict]) -> str:
    """Return the table of one case: a line for each provider."""
    header = ["provider", "ms", "p10–p90", "TOP/s", "× bf16", "× bf16 compiled"]
    header += ["weights MiB", "peak MiB", "SQNR dB", "first call s"]
    lines = []
    for row in rows:
        label = LABELS[row["provider"]]
        if "ms" not in row:
            reason = row.get("skipped") or row.get("error") or "not measured"
            lines.append([label, reason, *[None] * (len(header) - 2)])
            continue
        sizes = [row.get("weight_bytes"), row["peak_bytes"]]
        lines.append(
            [label, number(row["ms"]), f"{number(row['p10'])}–{number(row['p90'])}"]
            + [number(row[name]) for name in ("tops", "times_bf16", "times_bf16_compiled")]
            + [None if size is None else f"{size / 2**20:.0f}" for size in sizes]
            + [number(row["sqnr_db"]), number(row["first_call_s"])]
        )
    return table(header, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print and store; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, a dry run")
    parser.add_argument("--block", action="store_true", help="the transformer block instead")
    parser.add_argument("--providers", nargs="+", choices=LABELS, default=list(LABELS))
    parser.add_argument("--budget", type=float, default=240, help="seconds (default 240)")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--commit", help="commit to record where there is no git history")
    options = parser.parse_args(arguments)
    quick = options.quick or device().type != "cuda"
    cases = (QUICK_BLOCKS if quick else BLOCKS) if options.block else (QUICK if quick else FULL)
    facts = environment(quick=quick, revision=options.commit)
    say("\n".join(f"{name}: {value}" for name, value in facts.items()))
    path = options.json
    if path is None and not quick and len(options.providers) == len(LABELS):
        path = result_path(facts, "block" if options.block else "ffn")
    start, rows, late = time.perf_counter(), [], [case.name for case in cases]
    for index, case in enumerate(cases, start=1):
        if time.perf_counter() - start > options.budget:
            break
        with torch.no_grad():
            found = measure(case, options.providers, start + options.budget * index / len(cases))
        rows += found
        late.remove(case.name)
        torch.compiler.reset()
        if path is not None:
            result = {"schema": SCHEMA} | facts | {"rows": rows, "not_started": late}
            write_json(path, json.loads(json.dumps(result)))
        say(f"\n{case.name}\n{ffn_table(found)}")
    failed = [f"{row['case']} {row['provider']}: {row['error']}" for row in rows if "error" in row]
    failed += [f"{name}: not started, the budget was over" for name in late]
    for line in failed:
        say(f"failed: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
