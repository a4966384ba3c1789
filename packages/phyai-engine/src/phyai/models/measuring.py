"""What the measurements of all models share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from phyai.dispatch.bootstrap import initialize_kernel_system, kernel_selector_scope
from phyai.dispatch.config import KernelConfig
from phyai.dispatch.types import ModelContext
from phyai_quant import use_quant_plan


@contextmanager
def policy_in_force(config: KernelConfig, device: Any, family: str) -> Iterator[None]:
    """Puts the kernel rules and the quantization of a policy in force.

    Args:
        config: names the policy.
        device: anything that kernels are chosen for.
        family: of the model, which rules may match.
    """
    selector = initialize_kernel_system(config, device=device, model=ModelContext(family=family))
    with kernel_selector_scope(selector), use_quant_plan(selector.policy.quant_plan):
        yield


def quantiles(values: list[float]) -> dict[str, float]:
    """Returns median, 10th, 90th and 99th percentile of milliseconds."""
    found = torch.tensor(values, dtype=torch.float64)
    return {
        name: round(float(found.quantile(share)), 4)
        for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    }


def kernel_times(function: Callable[[], Any]) -> list[tuple[str, int, float]]:
    """Returns (kernel, launches, microseconds) of one call, longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        function()
        torch.cuda.synchronize()
    rows = [
        (event.key, event.count, event.self_device_time_total)
        for event in found.key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(rows, key=lambda row: -row[2])
