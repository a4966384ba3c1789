"""Independent work on streams of its own, so that the end of one part overlaps the next."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def _streams(device: torch.device, count: int) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(count))


def side_by_side(runs: Sequence[Callable[[], Tensor]], device: torch.device) -> list[Tensor]:
    """Returns the results of ``runs``, each but the first on a stream of its own.

    All start behind what the current stream has been given, and the current stream goes on behind
    all of them, so results may be used and freed as if they were made on it: a later call, which
    alone allocates on those streams, waits for it. It can be recorded in a CUDA graph. Elsewhere
    than on a CUDA device they run one after the other.

    Args:
        runs: functions that do not depend on each other.
        device: where they run.
    """
    if device.type != "cuda" or len(runs) < 2:
        return [run() for run in runs]
    current = torch.cuda.current_stream(device)
    streams = _streams(current.device, len(runs) - 1)
    for stream in streams:
        stream.wait_stream(current)
    found = [runs[0]()]
    for stream, run in zip(streams, runs[1:], strict=True):
        with torch.cuda.stream(stream):
            found.append(run())
    for stream in streams:
        current.wait_stream(stream)
    return found
