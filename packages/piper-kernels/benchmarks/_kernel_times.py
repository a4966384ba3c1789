"""Device time of a call by kernel."""

from collections.abc import Callable

import torch


def kernel_times(run: Callable[[], object], target: torch.device) -> dict[str, float]:
    """Return the milliseconds of one call by device kernel, longest first; none on the CPU.

    Kernels of several streams may overlap, so the sum may exceed the time of the call.
    """
    if target.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        run()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in record.events() or ():
        if event.device_type.name == "CUDA":
            name = event.name[:120]
            times[name] = times.get(name, 0.0) + event.device_time_total / 1e3
    return dict(sorted(times.items(), key=lambda item: -item[1]))
