"""Device time of a call by phase, from the names of its kernels."""

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from _harness import device

import piper_kernels.attention

PHASES = ("preparation", "routing", "attention")
CALLS = 4


@cache
def _preparation_kernels() -> dict[str, str]:
    """Return the phase of every kernel of the preparation, from the sources."""
    folder = Path(piper_kernels.attention.__file__).parent / "_preparation"
    found: dict[str, str] = {}
    for path in folder.glob("*.py"):
        phase = "routing" if "route" in path.stem else "preparation"
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found[node.name] = phase
    return found


def phase_of(kernel: str) -> str:
    """Return the phase of a device kernel."""
    return _preparation_kernels().get(kernel, "attention")


def profile_call(run: Callable[[], object]) -> tuple[dict[str, float], list[str]]:
    """Return the device milliseconds of one call by phase and its kernels; nothing on the CPU."""
    if device().type != "cuda":
        return {}, []
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    times: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    names: dict[str, None] = {}
    for event in record.events() or ():
        if event.device_type.name == "CUDA":
            names[event.name[:120]] = None
            times[phase_of(event.name)] += event.device_time_total / 1e3 / CALLS
    return {phase: value for phase, value in times.items() if value}, list(names)
