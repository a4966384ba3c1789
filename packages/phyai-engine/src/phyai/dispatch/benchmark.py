"""The built-in measurement of the autotune profile."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phyai.dispatch.bench_inputs import BenchInputs, InputSets, offered_inputs
from phyai.dispatch.catalog import Catalog
from phyai.dispatch.facts import Facts
from phyai.dispatch.opspec import Impl
from phyai.dispatch.selection import Selection

WARM_UPS = 3
ROUNDS = 11

_CPU_CACHE_BYTES = 1 << 20
_GPU_CACHE_BYTES = 64 << 20
_HEAD_START_CYCLES = 400_000

Next = Callable[[], BenchInputs]


def bench_device(selection: Selection) -> Any:
    """Returns the torch device a selection runs on."""
    import torch

    profile = selection.query.device
    if profile is None or profile.vendor not in {"nvidia", "amd"}:
        return torch.device("cpu")
    return torch.device("cuda", profile.index or 0)


class InterleavedBenchmark:
    """Times rows against each other on equal inputs.

    Every round calls each row once, in an order that rotates, so that clocks and caches treat all
    alike; a row's time is the median over the rounds. On a GPU device events enclose each call,
    the device is kept busy while the call is enqueued, so that the time of launching is not
    measured, and nothing waits for the device before the end. Inputs are those that the running
    model offers (`live_inputs`), else made from the facts by the operation's ``bench_args``. They
    are copied into sets larger than the L2 cache, so no call finds its inputs there.

    Args:
        catalog: whose operations make inputs.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def __call__(self, impl: Impl, facts: Facts, selection: Selection) -> float:  # noqa: ARG002
        """Returns the milliseconds of one row.

        Raises:
            NotImplementedError: if there are no inputs for the operation.
        """
        result = self.compare((selection,))[selection.kernel_id]
        if isinstance(result, Exception):
            raise result
        return result

    def compare(self, selections: Sequence[Selection]) -> Mapping[str, float | Exception]:
        """Returns the milliseconds of each row, or what it raised.

        Raises:
            NotImplementedError: if there are no inputs for the operation.
            RuntimeError: while a CUDA graph is being captured.
        """
        import torch

        device = bench_device(selections[0])
        if device.type != "cuda":
            return _compare(selections, self._sets(selections[0], device).next, _time_cpu)
        with torch.cuda.device(device), torch.no_grad():
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("rows cannot be measured while a CUDA graph is being captured")
            return _compare(selections, self._sets(selections[0], device).next, _time_gpu)

    def _sets(self, selection: Selection, device: Any) -> InputSets:
        inputs = offered_inputs(selection.query.op)
        if inputs is None:
            make = self._catalog.spec(selection.query.op).bench_args
            if make is None:
                raise NotImplementedError(
                    f"operation {selection.query.op!r} has no benchmark inputs; it is measured "
                    "where a running model offers its own"
                )
            made = make(selection.facts, device)
            inputs = made if isinstance(made, BenchInputs) else BenchInputs(made)
        return InputSets(inputs, _cache_bytes(device))


def default_benchmark(catalog: Catalog) -> InterleavedBenchmark:
    """Returns the hook that the autotune profile installs."""
    return InterleavedBenchmark(catalog)


def _cache_bytes(device: Any) -> int:
    """Returns a size whose use leaves nothing older in the cache: twice L2 on a GPU."""
    import torch

    if device.type != "cuda":
        return _CPU_CACHE_BYTES
    properties = torch.cuda.get_device_properties(device)
    return 2 * (getattr(properties, "L2_cache_size", 0) or _GPU_CACHE_BYTES)


def _compare(
    selections: Sequence[Selection],
    next_inputs: Next,
    measure: Callable[[Sequence[Selection], Next], Mapping[str, list[float]]],
) -> Mapping[str, float | Exception]:
    results: dict[str, float | Exception] = {}
    able: list[Selection] = []
    for selection in selections:
        try:
            for _ in range(WARM_UPS):
                _call(selection, next_inputs())
        except Exception as error:
            results[selection.kernel_id] = error
        else:
            able.append(selection)
    if able:
        for kernel_id, times in measure(able, next_inputs).items():
            results[kernel_id] = statistics.median(times)
    return results


def _call(selection: Selection, inputs: BenchInputs) -> None:
    selection.execute(*inputs.args, **inputs.kwargs)


def _turns(selections: Sequence[Selection]) -> list[Selection]:
    """Returns the calls of all rounds; each round starts with another row."""
    turns: list[Selection] = []
    for number in range(ROUNDS):
        start = number % len(selections)
        turns += [*selections[start:], *selections[:start]]
    return turns


def _time_cpu(selections: Sequence[Selection], next_inputs: Next) -> Mapping[str, list[float]]:
    times: dict[str, list[float]] = {item.kernel_id: [] for item in selections}
    for selection in _turns(selections):
        inputs = next_inputs()
        start = time.perf_counter()
        _call(selection, inputs)
        times[selection.kernel_id].append(1e3 * (time.perf_counter() - start))
    return times


def _time_gpu(selections: Sequence[Selection], next_inputs: Next) -> Mapping[str, list[float]]:
    import torch

    marks: list[tuple[str, Any, Any]] = []
    for selection in _turns(selections):
        inputs = next_inputs()
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HEAD_START_CYCLES)
        start.record()
        _call(selection, inputs)
        stop.record()
        marks.append((selection.kernel_id, start, stop))
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {item.kernel_id: [] for item in selections}
    for kernel_id, start, stop in marks:
        times[kernel_id].append(start.elapsed_time(stop))
    return times
