"""Measure on all GPUs of this machine what is built for many of them, and store the JSON.

    python scripts/gpu_check_multi.py [--checkpoint FOLDER] [--seconds 60] [--clients 64]

Cosmos3 Nano, the DROID policy's loop: one GPU beside all, which share guidance branches and layers;
Super likewise, without one GPU that could hold it; both with random weights in the full size. π0.5:
one replica behind ``phyai serve`` beside one on every GPU, and one of those killed under load; its
checkpoint of random weights is written to a temporary folder unless one is given. ``--tiny``
rehearses everything on the CPU with two processes and stores nothing but ``--json``.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _device_run import ROOT, use_this_checkout

ENGINE = ROOT / "packages" / "phyai-engine" / "benchmarks"
PI05_POLICY = ROOT / "examples/pi05/kernel_policies/pi05_h200.yaml"
COSMOS3_POLICY = ROOT / "examples/cosmos3/kernel_policies/cosmos3_h200.yaml"
REACH = ROOT / "examples/pi05/reach/checkpoint"
LEAST = 2


def grids(devices: int) -> list[tuple[int, int]]:
    """Return how devices share Cosmos3: guidance branches at a time, and ranks of a layer."""
    found = [(2, devices // 2)] if devices % 2 == 0 else []
    return [*found, (1, devices)]


class Check:
    """What runs one after another; a part that fails does not stop the next.

    Args:
        options: of the command line.
        devices: how many take part.
        output: where results go after every part.
        environment: what the results were measured on.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        devices: int,
        output: Path | None,
        environment: dict[str, Any],
    ) -> None:
        self.options, self.devices, self.output = options, devices, output
        self.document: dict[str, Any] = {"devices": devices, "environment": environment}
        self.failed: list[str] = []

    def part(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Run a part, print and store what it found."""
        print(f"== {name}", flush=True)
        try:
            found = measure()
        except Exception as error:  # the other parts are still worth measuring
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
            self.failed.append(name)
        self.document[name] = found
        print(json.dumps(found), flush=True)
        if self.output is not None:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.output.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")

    def cosmos3(self, *, large: bool) -> dict[str, Any]:
        """Time the DROID policy's loop of Nano or Super."""
        import torch

        from phyai.models.cosmos3.bench_parallel import DROID_LAYOUT, time_ranks
        from phyai.models.cosmos3.config import Cosmos3Config
        from phyai.models.cosmos3.droid import PolicyContract
        from phyai.models.cosmos3.sampler import Sampling
        from phyai.models.cosmos3.state import Layout

        if self.options.tiny:
            latent: dict[str, Any] = {
                "latent_channel": 6,
                "patch_latent_dim": 24,
                "num_hidden_layers": 2,
            }
            return time_ranks(
                Cosmos3Config.tiny(num_embodiment_domains=9, **latent),
                Layout(2, 4, 4, fps=15.0),
                Sampling(2, 3.0, 5.0),
                grids=grids(self.devices),
                dtype=torch.float32,
                kind="cpu",
                alone=not large,
            )
        return time_ranks(
            Cosmos3Config.super_() if large else Cosmos3Config.nano(),
            DROID_LAYOUT,
            PolicyContract.nano().sampling,
            grids=grids(self.devices)[:1] if large else grids(self.devices),
            policy=COSMOS3_POLICY,
            alone=not large,
        )

    def pi05(self) -> dict[str, Any]:
        """Serve with one replica and with one for every device; kill one of those."""
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = self.options.checkpoint or self._checkpoint(Path(folder) / "pi05")
            one, many = (
                self._serve(checkpoint, count, Path(folder) / f"{count}.json")
                for count in (1, self.devices)
            )
        rates = [found["rows"][-1]["chunks/s"] for found in (one, many)]
        return {"one": one, "many": many, "speedup": round(rates[1] / rates[0], 3)}

    def _checkpoint(self, folder: Path) -> Path:
        if self.options.tiny:
            return REACH
        script = ROOT / "scripts" / "write_random_checkpoint.py"
        subprocess.run([sys.executable, str(script), str(folder), "--device", "cuda"], check=True)
        return folder

    def _serve(self, checkpoint: Path, replicas: int, output: Path) -> dict[str, Any]:
        options = self.options
        command = [sys.executable, str(ENGINE / "benchmark_serving.py"), str(checkpoint)]
        command += ["--replicas", str(replicas), "--clients", str(options.clients)]
        command += ["--seconds", str(options.seconds), "--json", str(output)]
        command += ["--device", "cpu"] if options.tiny else ["--kernel-config", str(PI05_POLICY)]
        command += ["--kill"] if replicas > 1 else []
        subprocess.run(command, check=True)
        return json.loads(output.read_text(encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and return 1 if a part failed, 2 without the devices."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="of π0.5; default: random weights")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="default: the results of the device")
    parser.add_argument("--commit", help="commit to record where git shows another or none")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    options = parser.parse_args(arguments)
    use_this_checkout()
    sys.path.insert(0, str(ENGINE))
    import torch

    environment = importlib.import_module("_environment").environment
    devices = LEAST if options.tiny else torch.cuda.device_count()
    if devices < LEAST:
        print(f"error: {devices} GPUs; this check needs {LEAST} or more", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.tiny else "cuda")
    output = options.json
    if output is None and not options.tiny:
        name = torch.cuda.get_device_name(0).lower().replace(" ", "-")
        output = ENGINE / "results" / name / f"devices-{devices}.json"
    check = Check(options, devices, output, environment(device, options.commit))
    check.part("cosmos3_nano", lambda: check.cosmos3(large=False))
    check.part("cosmos3_super", lambda: check.cosmos3(large=True))
    check.part("pi05", check.pi05)
    for name in check.failed:
        print(f"failed: {name}", file=sys.stderr)
    return int(bool(check.failed))


if __name__ == "__main__":
    sys.exit(main())
