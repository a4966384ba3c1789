"""Times of the stages of one request, on the device's clock without waiting for it."""

import time

import torch


class Stopwatch:
    """Starts when it is made; each mark ends a stage.

    On CUDA the marks are events of the current stream, so that stages that are only queued are
    timed when they run.

    Args:
        device: whose time counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self.mark("")

    def mark(self, stage: str) -> None:
        """Ends a stage; the time since the mark before is its."""
        if self._device.type != "cuda":
            self._marks.append((stage, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((stage, event))

    def milliseconds(self) -> dict[str, float]:
        """Waits for the last mark; returns the time of each stage and their ``total``."""
        last = self._marks[-1][1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        times: dict[str, float] = {}
        for (_, before), (stage, now) in zip(self._marks, self._marks[1:], strict=False):
            times[stage] = times.get(stage, 0.0) + _elapsed(before, now)
        return times | {"total": sum(times.values())}


def _elapsed(before: float | torch.cuda.Event, now: float | torch.cuda.Event) -> float:
    if isinstance(before, torch.cuda.Event) and isinstance(now, torch.cuda.Event):
        return before.elapsed_time(now)
    assert isinstance(before, float)
    assert isinstance(now, float)
    return 1e3 * (now - before)
