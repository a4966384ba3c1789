"""Every benchmark as ``gpu_check.py --benchmarks`` runs it, and the pages that show the results."""

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _device_run import ROOT

KERNELS = "packages/piper-kernels/benchmarks"
ENGINE = "packages/phyai-engine/benchmarks"
RESULTS = f"{ENGINE}/results/{{device}}"
PI05_POLICIES = "examples/pi05/kernel_policies"
COSMOS3_POLICIES = "examples/cosmos3/kernel_policies"


@dataclass(frozen=True)
class Run:
    """One call of a benchmark.

    Attributes:
        script: relative to the checkout.
        seconds: what it takes on an H200, about; ten times that is when it is stopped.
        arguments: ``{device}`` is the folder of the device's results.
    """

    script: str
    seconds: int
    arguments: tuple[str, ...] = ()

    def command(self, device: str) -> list[str]:
        """Return the command line on a device."""
        arguments = [argument.format(device=device) for argument in self.arguments]
        return [sys.executable, str(ROOT / self.script), *arguments]


def _policies(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(word for name in names for word in ("--policy", f"{folder}/{name}.yaml"))


RUNS = (
    Run(f"{KERNELS}/run_all.py", 90),
    Run(f"{KERNELS}/benchmark_linear.py", 170),
    Run(f"{KERNELS}/benchmark_ffn.py", 230),
    Run(f"{KERNELS}/benchmark_ffn.py", 60, ("--block",)),
    Run(f"{KERNELS}/benchmark_attention.py", 80),
    Run(f"{KERNELS}/benchmark_sparse_attention.py", 70),
    Run(f"{KERNELS}/benchmark_convrot_int8_conv3d.py", 60),
    Run(f"{KERNELS}/benchmark_convrot_int8_projection.py", 50),
    Run(f"{KERNELS}/benchmark_video_dit_block.py", 130),
    Run(f"{ENGINE}/benchmark_dispatch.py", 60),
    Run(
        f"{ENGINE}/benchmark_pi05.py",
        240,
        (
            *_policies(PI05_POLICIES, "pi05_h200", "pi05_h200_fast"),
            *("--batch", "8", "--lerobot", "--compile", "step"),
            *("--output", f"{RESULTS}/pi05.json"),
        ),
    ),
    Run(
        f"{ENGINE}/benchmark_cosmos3.py",
        300,
        (
            *_policies(COSMOS3_POLICIES, "cosmos3_h200", "cosmos3_h200_int8"),
            *_policies(COSMOS3_POLICIES, "cosmos3_h200_fast", "cosmos3_h200_fp8"),
            *("--output", f"{RESULTS}/cosmos3.json"),
        ),
    ),
    Run(
        f"{ENGINE}/benchmark_cosmos3.py",
        120,
        (
            *_policies(COSMOS3_POLICIES, "cosmos3_h200"),
            *("--video", "--output", f"{RESULTS}/cosmos3.json"),
        ),
    ),
    Run(f"{ENGINE}/benchmark_cosmos3_vae.py", 120, ("--output", f"{RESULTS}/cosmos3_vae.json")),
)
"""In the order in which they run, one after another; the estimates add up to 30 minutes."""

NEED_MORE = {
    f"{ENGINE}/benchmark_serving.py": "a checkpoint; scripts/write_random_checkpoint.py writes one"
}
"""Benchmarks that need more than a device, and what."""

PAGES = (
    Run(f"{KERNELS}/linear_page.py", 2),
    Run(f"{KERNELS}/attention_page.py", 2),
    Run(f"{KERNELS}/conv3d_page.py", 2),
    Run(f"{KERNELS}/video_dit_block_page.py", 2),
    Run(f"{ENGINE}/benchmark_pi05.py", 10, ("--page", f"{RESULTS}/pi05.json")),
    Run(f"{ENGINE}/benchmark_cosmos3.py", 10, ("--page", f"{RESULTS}/cosmos3.json")),
    Run("scripts/plot_results.py", 10),
)
"""What shows results of an H200; other devices have no page."""
DEVICE_OF_PAGES = "nvidia-h200"


def run_benchmarks(device: str, runs: Sequence[Run] = RUNS) -> int:
    """Run benchmarks, then write the pages and pictures that show them.

    Args:
        device: Folder of the results, such as ``nvidia-h200``.
        runs: What to run; one that fails or hangs does not stop the next.

    Returns:
        1 if one failed, else 0.
    """
    failed = [run for run in runs if not _succeeds(run, device)]
    if device == DEVICE_OF_PAGES:
        failed += [run for run in PAGES if not _succeeds(run, device)]
    for script, need in NEED_MORE.items():
        print(f"not run: {script} needs {need}")
    for run in failed:
        print(f"failed: {' '.join([run.script, *run.arguments])}", file=sys.stderr)
    return int(bool(failed))


def _succeeds(run: Run, device: str) -> bool:
    command, began = run.command(device), time.monotonic()
    print(f"== {' '.join([Path(run.script).name, *command[2:]])}", flush=True)
    try:
        status = subprocess.run(command, cwd=ROOT, check=False, timeout=10 * run.seconds).returncode
    except subprocess.TimeoutExpired:
        status = "stopped"
    print(f"== {time.monotonic() - began:.0f} s, status {status}", flush=True)
    return status == 0
