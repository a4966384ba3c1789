"""Timing of many variants in turns, as replayed CUDA graphs with cold operands.

A graph holds several calls, each with another set of operands, so that launches from Python and
warm caches do not count. A variant that cannot be captured is timed call by call behind a short
busy kernel. Variants in turns run at one clock, which their common power allows; where they differ
in power, ``sustain`` times each of them alone at the clock that it settles at. On the CPU the clock
of the host is used, which only shows that a variant runs.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from _harness import BUSY_CYCLES, device

GRAPH_MS = 0.5
VARIANT_MS = 250.0
MOST_CALLS = 64
REPEATS = (5, 25)
QUICK_REPEATS = 2
# A power limit lowers the clock within tens of milliseconds.
SUSTAINED_MS = 600.0


@dataclass(frozen=True)
class Variant:
    """Something to time.

    Attributes:
        run: Called with the index of an operand set.
        sets: Number of operand sets to rotate through.
    """

    run: Callable[[int], object]
    sets: int


@dataclass(frozen=True)
class Replay:
    """A variant that is ready to be timed.

    Attributes:
        start: Enqueues ``calls`` calls.
        calls: Calls that one start enqueues.
        captured: Whether the calls are one CUDA graph.
        repeats: How often to start it.
    """

    start: Callable[[int], object]
    calls: int
    captured: bool
    repeats: int


def time_variants(variants: Mapping[str, Variant], *, sustained: bool = False) -> dict[str, dict]:
    """Time variants in turns.

    Args:
        variants: By name.
        sustained: Whether to time each variant alone after that.

    Returns:
        By name: ``ms`` of one call (the median), ``p10``, ``p90``, ``captured`` and, if asked
        for, ``sustained_ms``, or ``error`` with the message of a variant that failed.
    """
    prepare = _capture if device().type == "cuda" else _host_replay
    ready: dict[str, Replay] = {}
    results: dict[str, dict] = {}
    for name, variant in variants.items():
        try:
            ready[name] = prepare(variant)
        except Exception as error:  # one variant that fails must not stop the others
            results[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
    times: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(max((replay.repeats for replay in ready.values()), default=0)):
        for name, replay in ready.items():
            if turn < replay.repeats:
                times[name].append(_milliseconds(replay, turn) / replay.calls)
    for name, values in times.items():
        ordered = sorted(values)
        tail = len(ordered) // 10
        results[name] = {
            "ms": statistics.median(ordered),
            "p10": ordered[tail],
            "p90": ordered[-1 - tail],
            "captured": ready[name].captured,
        }
    if sustained:
        for name, replay in ready.items():
            results[name]["sustained_ms"] = sustain(replay)
    return results


def sustain(replay: Replay, span_ms: float = SUSTAINED_MS) -> float:
    """Repeat a variant alone for a while; return the median time of a call in the second half."""
    values = [_milliseconds(replay, 0)]
    while sum(values) < span_ms and device().type == "cuda":
        values.append(_milliseconds(replay, len(values)))
    return statistics.median(values[len(values) // 2 :]) / replay.calls


def _host_replay(variant: Variant) -> Replay:
    variant.run(0)
    return Replay(lambda turn: variant.run(turn % variant.sets), 1, False, QUICK_REPEATS)


def _capture(variant: Variant) -> Replay:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for index in range(variant.sets):
            variant.run(index)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    single = Replay(lambda turn: variant.run(turn % variant.sets), 1, False, REPEATS[1])
    graph = _graph(variant, variant.sets)
    if graph is None:
        one = min(_milliseconds(single, turn) for turn in range(3))
        return Replay(single.start, 1, False, _repeats(one))
    # The estimate comes from a graph: outside, launches of small calls take longer than calls.
    trial = Replay(lambda _turn: graph.replay(), variant.sets, True, 3)
    one = min(_milliseconds(trial, turn) for turn in range(3)) / variant.sets
    rounds = min(MOST_CALLS, int(GRAPH_MS / max(one, 1e-3))) // variant.sets + 1
    calls = rounds * variant.sets
    long = _graph(variant, calls) if rounds > 1 else graph
    if long is None:
        long, calls = graph, variant.sets
    long.replay()
    return Replay(lambda _turn: long.replay(), calls, True, _repeats(one * calls))


def _graph(variant: Variant, calls: int) -> torch.cuda.CUDAGraph | None:
    """Return a graph of calls, ``None`` for a variant that cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in range(calls):
                variant.run(call % variant.sets)
    except (RuntimeError, NotImplementedError):
        torch.cuda.synchronize()
        return None
    return graph


def _repeats(milliseconds: float) -> int:
    """Return how often to start what takes so long."""
    return max(REPEATS[0], min(REPEATS[1], int(VARIANT_MS / max(milliseconds, 1e-3))))


def _milliseconds(replay: Replay, turn: int) -> float:
    if device().type != "cuda":
        start = time.perf_counter()
        replay.start(turn)
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if not replay.captured:
        torch.cuda._sleep(BUSY_CYCLES)
    begin.record()
    replay.start(turn)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
