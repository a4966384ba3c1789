"""The parts of ``gpu_check_multi.py``: Cosmos3 on shared branches and layers, π0.5 in replicas."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _device_run import ROOT
from _time_limit import program

PI05_POLICY = ROOT / "examples/pi05/kernel_policies/pi05_h200.yaml"
COSMOS3_POLICY = ROOT / "examples/cosmos3/kernel_policies/cosmos3_h200.yaml"
REACH = ROOT / "examples/pi05/reach/checkpoint"
RESERVE = 10e9
"""Bytes of a GPU that are not for weights: activations, what communicates, the driver."""

Keep = Callable[[str, object], None]
"""Stores the value of a result under its name."""


def grids(devices: int) -> list[tuple[int, int]]:
    """Return how devices share Cosmos3: guidance branches at a time, and ranks of a layer."""
    found = [(2, devices // 2)] if devices % 2 == 0 else []
    return [*found, (1, devices)]


class Cosmos3:
    """The loop of the DROID policy on one device and on all.

    Args:
        devices: how many.
        memory: bytes of each.
        tiny: whether this is a rehearsal on the CPU.
    """

    def __init__(self, devices: int, memory: float, *, tiny: bool) -> None:
        self.devices, self.memory, self.tiny = devices, memory, tiny

    def measure(self, keep: Keep, *, large: bool) -> None:
        """Time Nano or Super; what the devices lack the memory for has that as its `reason`."""
        import torch

        from phyai.models.cosmos3.bench_parallel import (
            DROID_LAYOUT,
            grid_name,
            time_ranks,
            weight_bytes,
        )
        from phyai.models.cosmos3.config import Cosmos3Config
        from phyai.models.cosmos3.droid import PolicyContract
        from phyai.models.cosmos3.sampler import Sampling
        from phyai.models.cosmos3.state import ActionLayout, Layout

        config = Cosmos3Config.super_() if large else Cosmos3Config.nano()
        layout, sampling = DROID_LAYOUT, PolicyContract.nano().sampling
        options: dict[str, Any] = {"policy": COSMOS3_POLICY}
        if self.tiny:
            latent: dict[str, Any] = {"latent_channel": 6, "patch_latent_dim": 24}
            config = Cosmos3Config.tiny(num_hidden_layers=2, num_embodiment_domains=9, **latent)
            layout = Layout(2, 4, 4, (0,), 15.0, ActionLayout(3, 0, (0,), 4, 2))
            sampling = Sampling(2, 3.0, 5.0)
            options = {"dtype": torch.float32, "kind": "cpu"}

        def fits(name: str, needed: float) -> bool:
            enough = needed + RESERVE <= self.memory
            if not enough:
                keep(name, {"reason": self._lacks(needed)})
            return enough

        shared = [
            grid
            for grid in grids(self.devices)
            if fits(grid_name(grid), weight_bytes(config, grid[1]))
        ]
        alone = fits(grid_name(None), weight_bytes(config, 1))
        exact = fits("fp32", 2 * weight_bytes(config, 1))
        if shared:
            options |= {"grids": shared, "alone": alone, "exact": exact, "report": keep}
            time_ranks(config, layout, sampling, **options)

    def _lacks(self, needed: float) -> str:
        return (
            f"weights of {needed / 1e9:.0f} GB and {RESERVE / 1e9:.0f} GB for the rest; "
            f"a GPU has {self.memory / 1e9:.0f} GB"
        )


class Pi05:
    """Servers with one replica and with one for every device, and a killed one of those.

    Args:
        options: of the command line.
        devices: how many.
        benchmarks: folder of ``benchmark_serving.py``.
    """

    def __init__(self, options: argparse.Namespace, devices: int, benchmarks: Path) -> None:
        self.options, self.devices, self.benchmarks = options, devices, benchmarks

    def measure(self, keep: Keep) -> None:
        """Keep `one`, `many` and how many times the chunks of one are those of many.

        Raises:
            RuntimeError: A server or its load failed; what it found before is kept.
        """
        seconds = self.options.seconds
        alone = self.options.one_seconds or seconds
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = self.options.checkpoint or self._checkpoint(Path(folder) / "pi05")
            one = self._serve(checkpoint, 1, alone, Path(folder), lambda f: keep("one", f))

            def keep_many(found: dict[str, Any]) -> None:
                keep("many", found)
                rates = [server["rows"][-1]["chunks/s"] for server in (found, one)]
                keep("speedup", round(rates[0] / rates[1], 3))

            self._serve(checkpoint, self.devices, seconds, Path(folder), keep_many)

    def _checkpoint(self, folder: Path) -> Path:
        if self.options.tiny:
            return REACH
        script = ROOT / "scripts" / "write_random_checkpoint.py"
        subprocess.run([sys.executable, str(script), str(folder), "--device", "cuda"], check=True)
        return folder

    def _serve(
        self,
        checkpoint: Path,
        replicas: int,
        seconds: float,
        folder: Path,
        keep: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        options, output = self.options, folder / f"{replicas}.json"
        command = [sys.executable, str(self.benchmarks / "benchmark_serving.py"), str(checkpoint)]
        command += ["--replicas", str(replicas), "--clients", str(options.clients)]
        command += ["--seconds", str(seconds), "--json", str(output)]
        command += ["--device", "cpu"] if options.tiny else ["--kernel-config", str(PI05_POLICY)]
        if replicas > 1:
            command += ["--kill", "--kill-seconds", str(options.kill_seconds)]
        found: dict[str, Any] = {}
        with program(command) as process:
            running = True
            while running:
                time.sleep(0.2)
                running = process.poll() is None
                if output.exists():
                    found = json.loads(output.read_text(encoding="utf-8"))
                    keep(found)
        if process.returncode or not found:
            raise RuntimeError(
                f"the load on {replicas} replicas ended with status {process.returncode}; its "
                "message is in the output of this check"
            )
        return found
