"""Independent work on streams of its own, so that the end of one part overlaps the next."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import lru_cache
from threading import get_ident

import torch
from torch import Tensor

_LANE: ContextVar[int] = ContextVar("lane", default=0)


def lane() -> int:
    """Returns which of the runs of `side_by_side` calls this, 0 outside of them.

    Memory that outlives a call and that kernels write, such as a workspace, belongs to one lane.
    """
    return _LANE.get()


def _in_lane(number: int, run: Callable[[], Tensor]) -> Tensor:
    before = _LANE.set(number)
    try:
        return run()
    finally:
        _LANE.reset(before)


@lru_cache(maxsize=64)
def _streams(
    device: torch.device,
    count: int,
    thread: int,  # noqa: ARG001  # one thread may record a graph while others go on
) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(count))


def side_by_side(runs: Sequence[Callable[[], Tensor]], device: torch.device) -> list[Tensor]:
    """Returns the results of ``runs``, each but the first on a stream of its own.

    All start behind what the current stream has been given, and the current stream goes on behind
    all of them, so results may be used and freed as if they were made on it: a later call of the
    thread, which alone allocates on those streams, waits for it. It can be recorded in a CUDA
    graph. Elsewhere than on a CUDA device they run one after the other.

    Args:
        runs: functions that do not depend on each other.
        device: where they run.
    """
    if device.type != "cuda" or len(runs) < 2:
        return [_in_lane(number, run) for number, run in enumerate(runs)]
    current = torch.cuda.current_stream(device)
    streams = _streams(current.device, len(runs) - 1, get_ident())
    for stream in streams:
        stream.wait_stream(current)
    found = [_in_lane(0, runs[0])]
    for number, stream in enumerate(streams, start=1):
        with torch.cuda.stream(stream):
            found.append(_in_lane(number, runs[number]))
    for stream in streams:
        current.wait_stream(stream)
    return found
