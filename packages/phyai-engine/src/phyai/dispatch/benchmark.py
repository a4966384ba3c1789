"""The built-in measurement of the autotune profile."""

import statistics
import time
from typing import Any

from phyai.dispatch.autotune import Benchmark
from phyai.dispatch.catalog import Catalog
from phyai.dispatch.facts import Facts
from phyai.dispatch.opspec import Impl
from phyai.dispatch.selection import Selection

_WARM_UPS = 3
_RUNS = 10


def bench_device(selection: Selection) -> Any:
    """Returns the torch device a selection runs on."""
    import torch

    profile = selection.query.device
    if profile is None or profile.vendor not in {"nvidia", "amd"}:
        return torch.device("cpu")
    return torch.device("cuda", profile.index or 0)


def default_benchmark(catalog: Catalog) -> Benchmark:
    """Returns a hook that times a row on inputs made from the call's facts.

    It runs 3 warm-ups and 10 timed calls and returns the median in milliseconds, measured with
    device events on a GPU and with a wall clock elsewhere. It raises NotImplementedError for an
    operation whose inputs cannot be made from facts, such as attention.
    """

    def measure(impl: Impl, facts: Facts, selection: Selection) -> float:
        make = catalog.spec(impl.op).bench_args
        if make is None:
            raise NotImplementedError(f"operation {impl.op!r} has no benchmark inputs")
        device = bench_device(selection)
        args = make(facts, device)
        for _ in range(_WARM_UPS):
            selection.execute(*args)
        timer = _time_gpu if device.type == "cuda" else _time_cpu
        return statistics.median(timer(selection, args))

    return measure


def _time_cpu(selection: Selection, args: tuple[Any, ...]) -> list[float]:
    times = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        selection.execute(*args)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def _time_gpu(selection: Selection, args: tuple[Any, ...]) -> list[float]:
    import torch

    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(_RUNS)
    ]
    for start, stop in marks:
        start.record()
        selection.execute(*args)
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in marks]
