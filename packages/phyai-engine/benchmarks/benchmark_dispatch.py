"""What choosing a kernel costs: warm selection, call sites, frozen call sites, and imports.

    python packages/phyai-engine/benchmarks/benchmark_dispatch.py

Times are those of the host. Every case is checked before it is timed, cases take turns, and the
median over the rounds is compared with its bound; the exit code is 1 when one is missed. The
result is written to ``results/<device>/dispatch.json`` next to this file.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _environment import environment
from _results import store

from phyai.dispatch import (
    CallSite,
    KernelQuery,
    ModelContext,
    Selector,
    load_policy,
    policy_from_mapping,
    set_kernel_selector,
)
from phyai_quant.specs.base import PhysicalSignature

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
POLICY = ROOT / "examples" / "pi05" / "kernel_policy.yaml"
ROUNDS, QUICK_ROUNDS = 25, 3
CALLS, QUICK_CALLS = 4000, 200
IMPORTS, QUICK_IMPORTS = 5, 1
GPU_LIBRARIES = ("cupy", "cutlass", "flashinfer", "fla", "flash_qla", "humming", "triton")


@dataclass(frozen=True)
class Case:
    """One repeated call.

    Attributes:
        name: what is repeated.
        bound_us: microseconds that the median may take; None is only reported.
        call: the call.
        repeated: whether it is so short that it is repeated ten times as often.
        check: raises ``AssertionError`` unless the call does what it should.
    """

    name: str
    bound_us: float | None
    call: Callable[[], object]
    check: Callable[[], None]
    repeated: bool


def expect(call: Callable[[], Any], kernel_id: str) -> Callable[[], None]:
    """Return a check that ``call`` chooses ``kernel_id``."""

    def check() -> None:
        found = call().kernel_id
        if found != kernel_id:
            raise AssertionError(f"chose {found}, expected {kernel_id}; not timed")

    return check


def layer_facts(device: torch.device, rows: int) -> dict[str, Any]:
    """Return what a dense linear layer states at a call with ``rows`` tokens."""
    return {
        "device": device,
        "dtype": {
            "input": torch.bfloat16,
            "output": torch.bfloat16,
            "weight": torch.bfloat16,
        },
        "dims": {"M": rows},
    }


def alternating(
    site: CallSite, facts: Sequence[Mapping[str, Any]], quant: Any
) -> Callable[[], Any]:
    """Return a call that never equals the one before it, so that the keyed memory answers."""
    turn = 0

    def call() -> Any:
        nonlocal turn
        turn = (turn + 1) % len(facts)
        return site.select(quant=quant, **facts[turn])

    return call


def cases(device: torch.device) -> list[Case]:
    """Return the cases, on a selector with the shipped policy of π0.5."""
    selector = Selector(policy=load_policy(POLICY), device=device, model=ModelContext("pi05"))
    set_kernel_selector(selector)
    quant = PhysicalSignature("bf16")
    static = {"N": 2560, "K": 2048}
    facts = layer_facts(device, 50)
    site, frozen = (CallSite("gemm", role="expert", dims=static) for _ in range(2))
    query = partial(
        KernelQuery.build,
        "gemm",
        role="expert",
        quant=quant,
        device=device,
        dtype=facts["dtype"],
        dims={"M": 50, **static},
    )
    kernel_id = selector.select(query()).kernel_id
    same = partial(site.select, quant=quant, **facts)
    other = alternating(site, [layer_facts(device, rows) for rows in (50, 968)], quant)
    pinned = partial(frozen.select, quant=quant, **facts)
    pinned()
    frozen.freeze()
    select = partial(selector.select, query())
    asked = lambda: selector.select(query())  # noqa: E731
    policy = policy_from_mapping({}, catalog=selector.catalog)
    empty = Selector(selector.catalog, policy, device=device)

    def cold() -> Any:
        empty.clear_cache()
        return empty.select(query())

    timed = [
        ("Selector.select, warm", 100.0, select),
        ("Selector.select, warm, query built", 100.0, asked),
        ("Selector.select, cold", None, cold),
        ("call site, same call as before", 3.0, same),
        ("call site, another call than before", 3.0, other),
        ("call site, frozen", 1.0, pinned),
    ]
    return [
        Case(name, bound, call, expect(call, kernel_id), repeated=name.startswith("call site"))
        for name, bound, call in timed
    ]


def measure(listed: Sequence[Case], rounds: int, calls: int) -> list[dict[str, Any]]:
    """Check the cases, then time them in turns."""
    times: dict[str, list[float]] = {case.name: [] for case in listed}
    for case in listed:
        case.check()
    for _ in range(rounds):
        for case in listed:
            number = calls if case.repeated else calls // 10
            repeat = range(number)
            call = case.call
            start = time.perf_counter()
            for _ in repeat:
                call()
            times[case.name].append(1e6 * (time.perf_counter() - start) / number)
    return [_row(case.name, times[case.name], case.bound_us, "us") for case in listed]


def _row(name: str, values: list[float], bound: float | None, unit: str) -> dict[str, Any]:
    median = statistics.median(values)
    return {
        "case": name,
        "unit": unit,
        "median": round(median, 3),
        "best": round(min(values), 3),
        "bound": bound,
        "within": bound is None or median <= bound,
    }


def measure_imports(repeats: int) -> list[dict[str, Any]]:
    """Time imports in fresh interpreters and list the GPU libraries they load.

    The time is that of the import alone, without the start of the interpreter.
    """
    rows = []
    imports = (("phyai", ""), ("phyai.dispatch", ""), ("phyai.engine", "torch"), ("torch", ""))
    for module, before in imports:
        found = [_import(module, before) for _ in range(repeats)]
        name = f"import {module}" + (f", after {before}" if before else "")
        bound = None if module == "torch" else 1.5
        row = _row(name, [entry["seconds"] for entry in found], bound, "s")
        row["gpu_libraries"] = sorted({name for entry in found for name in entry["loaded"]})
        row["within"] = row["within"] and not row["gpu_libraries"]
        rows.append(row)
    return rows


def _import(module: str, before: str) -> dict[str, Any]:
    code = (
        f"import {before or 'sys'}, json, sys, time; "
        f"start = time.perf_counter(); import {module}; seconds = time.perf_counter() - start; "
        f"loaded = [name for name in {GPU_LIBRARIES!r} if name in sys.modules]; "
        "print(json.dumps({'seconds': seconds, 'loaded': loaded}))"
    )
    found = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return json.loads(found.stdout.splitlines()[-1])


def run(device: torch.device, *, quick: bool) -> dict[str, Any]:
    """Measure everything on the host of ``device``."""
    rounds, calls = (QUICK_ROUNDS, QUICK_CALLS) if quick else (ROUNDS, CALLS)
    rows = measure(cases(device), rounds, calls)
    rows += measure_imports(QUICK_IMPORTS if quick else IMPORTS)
    return {**environment(device), "quick": quick, "rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark as a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="few repetitions, to see that it runs")
    parser.add_argument("--output", type=Path, help="result file instead of results/<device>/")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    result = run(device, quick=arguments.quick)
    folder = result["device"].lower().replace(" ", "-")
    target = arguments.output or HERE / "results" / folder / "dispatch.json"
    store(result, target)
    for row in result["rows"]:
        bound = "" if row["bound"] is None else f"  bound {row['bound']:g} {row['unit']}"
        mark = "" if row["within"] else "  MISSED"
        print(f"{row['case']:<36} {row['median']:>9.3f} {row['unit']}{bound}{mark}")
    print(f"written to {target}")
    return 0 if all(row["within"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
