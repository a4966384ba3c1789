"""Stages of windows that overlap on the streams of a device."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

Stage = Callable[[slice, int], None]
"""Work on a window of rows with the buffers of a slot, 0 or 1."""

SLOTS = 2


def run_stages(
    windows: Sequence[slice],
    stages: Sequence[Stage],
    main: int,
    device: torch.device,
    touched: Iterable[Tensor],
) -> None:
    """Run every stage on every window, each stage after the one before it.

    On an accelerator several windows run on one stream per stage: a stage works on a window
    while the next one works on the window before it. A slot is used again for the second window
    after, once the next stage has read it. The current stream waits for all of it.

    Args:
        windows: Rows of windows, in order.
        stages: What is done; a stage reads the slot that the one before it wrote.
        main: The stage that runs on the current stream.
        device: Where the work runs.
        touched: Tensors of the current stream that other streams read or write.
    """
    if len(windows) < 2 or device.type != "cuda":
        for index, window in enumerate(windows):
            for stage in stages:
                stage(window, index % SLOTS)
        return
    _overlap(windows, stages, main, device, touched)


def _overlap(
    windows: Sequence[slice],
    stages: Sequence[Stage],
    main: int,
    device: torch.device,
    touched: Iterable[Tensor],
) -> None:
    current = torch.cuda.current_stream(device)
    streams = [current if k == main else torch.cuda.Stream(device) for k in range(len(stages))]
    others = [stream for stream in streams if stream is not current]
    for stream in others:
        stream.wait_stream(current)
        # Without this, an exception in the middle would free what a stream still reads.
        for tensor in touched:
            tensor.record_stream(stream)
    done: list[list[torch.cuda.Event | None]] = [[None] * SLOTS for _ in stages]
    for index, window in enumerate(windows):
        slot = index % SLOTS
        for k, (stage, stream) in enumerate(zip(stages, streams, strict=True)):
            for neighbour in (k - 1, k + 1):
                finished = done[neighbour][slot] if 0 <= neighbour < len(stages) else None
                if finished is not None:
                    stream.wait_event(finished)
            with nullcontext() if stream is current else torch.cuda.stream(stream):
                stage(window, slot)
            done[k][slot] = event = torch.cuda.Event()
            event.record(stream)
    for stream in others:
        current.wait_stream(stream)
