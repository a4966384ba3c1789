"""Timing of operators against a baseline and a device copy, in one interleaved run.

A case is checked before it is timed: a wrong result raises ``WrongResultError``. On a GPU each
call is timed by device events behind a short busy kernel, so that the time to launch from
Python is not measured; variants take turns and inputs rotate through sets larger than the
caches. On the CPU the clock of the host is used, which only shows that the case runs.
"""

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from _report import commit, say, table, versions
from torch import Tensor

BUSY_CYCLES = 1_000_000
LOAD_CYCLES = 4_000_000_000
REPEATS, QUICK_REPEATS = 25, 2
WARM_UP, QUICK_WARM_UP = 3, 1
INPUT_SETS = 2


class WrongResultError(RuntimeError):
    """A result is not what the reference says, so it is not timed."""


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        name: Operation, format, shape and dtype.
        traffic: Bytes that must be read and written at least.
        variants: ``piper`` and ``baseline``, called with the index of an input set below
            ``INPUT_SETS``.
        check: Raises ``WrongResultError`` when the result is wrong.
    """

    name: str
    traffic: int
    variants: Mapping[str, Callable[[int], object]]
    check: Callable[[], None]


def device() -> torch.device:
    """Return the device that is measured: the first GPU, or else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Named(Protocol):
    """What a benchmark measures."""

    @property
    def name(self) -> str:
        """The name in tables, of which ``--cases`` gives a part."""
        ...


def choose_cases[C: Named](cases: Sequence[C], texts: Sequence[str] | None) -> list[C]:
    """Return the cases whose names contain any of the texts; all without texts.

    Raises:
        SystemExit: There are none.
    """
    found = [case for case in cases if not texts or any(text in case.name for text in texts)]
    if not found:
        names = "\n".join(case.name for case in cases)
        raise SystemExit(f"--cases: no name contains any of {texts}; the cases are\n{names}")
    return found


def size(full: tuple[int, int], quick: bool) -> tuple[int, int]:
    """Return the shape of a case, small for a dry run."""
    return (min(full[0], 48), 512) if quick else full


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Return ``|actual - exact| / |exact|`` in FP32."""
    exact = exact.float()
    return float((actual.float() - exact).norm() / exact.norm())


def require_as_exact(name: str, actual: Tensor, reference: Tensor, exact: Tensor) -> None:
    """Refuse a result that is further from the exact one than the reference, by over 5 %.

    Raises:
        WrongResultError: It is, or it is not finite.
    """
    found, allowed = relative_error(actual, exact), relative_error(reference, exact)
    if not found <= 1.05 * allowed + 1e-5:
        raise WrongResultError(
            f"{name}: relative error {found:.5f}, the reference has {allowed:.5f}; not timed"
        )


def measure(case: Case, *, quick: bool) -> dict:
    """Check a case and time its variants and a copy of the same traffic.

    Returns:
        A row: ``case``, ``ms`` with ``p10`` and ``p90``, ``gbps`` of the minimum traffic,
        ``baseline_ms``, ``ratio`` (baseline over ours), ``copy_gbps``, ``of_copy`` and the
        names of the kernels by variant.
    """
    case.check()
    target = device()
    source = torch.empty((INPUT_SETS, max(1, case.traffic // 2)), dtype=torch.uint8, device=target)
    copies = torch.empty_like(source)
    variants = dict(case.variants) | {"copy": lambda index: copies[index].copy_(source[index])}
    for run in variants.values():
        for index in range(QUICK_WARM_UP if quick else WARM_UP):
            run(index % INPUT_SETS)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(QUICK_REPEATS if quick else REPEATS):
        for name, run in variants.items():
            times[name].append(_milliseconds(run, repeat % INPUT_SETS, target))
    medians = {name: statistics.median(values) for name, values in times.items()}
    ordered = sorted(times["piper"])
    gbps = case.traffic / medians["piper"] / 1e6
    copy_gbps = case.traffic / medians["copy"] / 1e6
    return {
        "case": case.name,
        "ms": medians["piper"],
        "p10": ordered[len(ordered) // 10],
        "p90": ordered[-1 - len(ordered) // 10],
        "gbps": gbps,
        "baseline_ms": medians["baseline"],
        "ratio": medians["baseline"] / medians["piper"],
        "copy_gbps": copy_gbps,
        "of_copy": gbps / copy_gbps,
        "kernels": {name: kernel_names(run, target) for name, run in case.variants.items()},
    }


def _milliseconds(run: Callable[[int], object], index: int, target: torch.device) -> float:
    if target.type != "cuda":
        start = time.perf_counter()
        run(index)
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY_CYCLES)
    begin.record()
    run(index)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def kernel_names(run: Callable[[int], object], target: torch.device) -> list[str]:
    """Return the device kernels of one call in order, without repetitions; none on the CPU."""
    return kernels_by_run({"": lambda: run(0)}, target).get("", [])


def kernels_by_run(
    runs: Mapping[str, Callable[[], object]], target: torch.device
) -> dict[str, list[str]]:
    """Return the device kernels of calls in order, without repetitions; nothing on the CPU.

    One session of the profiler takes all calls, because a session costs most of a second.
    """
    if target.type != "cuda" or not runs:
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for run in runs.values():
            run()
            torch.cuda.synchronize()
            torch.cuda._sleep(1)  # its kernel separates the calls
        torch.cuda.synchronize()
    events = [event for event in record.events() or () if event.device_type.name == "CUDA"]
    calls: list[list[str]] = [[]]
    for event in sorted(events, key=lambda event: event.time_range.start):
        if "spin_kernel" in event.name:
            calls.append([])
        else:
            calls[-1].append(event.name[:120])
    if len(calls) != len(runs) + 1:
        return {}
    return {name: list(dict.fromkeys(names)) for name, names in zip(runs, calls, strict=False)}


def environment(*, quick: bool, revision: str | None = None) -> dict:
    """Return what a result depends on: device, clocks, versions and commit."""
    found: dict = {"quick": quick, "versions": versions(), "commit": revision or commit()}
    if device().type != "cuda":
        return found | {"device": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    return found | {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "clocks": _clocks(),
    }


def _clocks() -> dict[str, str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    fields = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "driver_version")
    # The first device of this process need not be the first of the machine.
    uuid = torch.cuda.get_device_properties(0).uuid
    query = [tool, f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    torch.cuda._sleep(LOAD_CYCLES)  # an idle device would report its resting clocks
    found = subprocess.run(query, capture_output=True, text=True, check=False)  # noqa: S603
    torch.cuda.synchronize()
    values = [part.strip() for part in found.stdout.split(",")]
    return dict(zip(fields, values, strict=False))


def rows_table(rows: list[dict]) -> str:
    """Return the Markdown table of measured rows."""
    header = ["case", "ms", "GB/s", "of copy", "baseline ms", "ratio"]
    keys = ("ms", "gbps", "of_copy", "baseline_ms", "ratio")
    return table(header, [[row["case"], *(_number(row.get(key)) for key in keys)] for row in rows])


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def main(run: Callable[[bool], dict]) -> None:
    """Run one benchmark as a program: the full size on a GPU, a dry run on the CPU."""
    quick = device().type != "cuda"
    result = run(quick)
    say(f"{environment(quick=quick)}")
    say(rows_table(result["rows"]))
