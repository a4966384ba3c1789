"""Run π0.5 on synthetic observations: shapes, timings and the kernels that were chosen.

python examples/pi05/run_pi05.py --checkpoint /path/to/pi05_base
PHYAI_KERNEL_CONFIG=examples/pi05/kernel_policies/humming_w4a16.yaml \
    python examples/pi05/run_pi05.py --checkpoint /path/to/pi05_base
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phyai.dispatch import NoKernelError
from phyai.engine import ActionChunk, Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig, parse_dtype
from phyai.models.pi05.main_pi05 import PI05Args
from phyai.processing import Observation

RUNS = 3


def parse_arguments() -> argparse.Namespace:
    """Return the command line; the GPU and bf16 are the defaults where there is a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="Run pi0.5 on synthetic observations.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--device", default=device, help="cpu or cuda:N (default: %(default)s)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="default: bf16 on a GPU")
    parser.add_argument("--steps", type=int, help="flow steps (default: the checkpoint's)")
    return parser.parse_args()


def load_engine(arguments: argparse.Namespace) -> Engine:
    """Return an engine; the kernel policy comes from PHYAI_KERNEL_CONFIG."""
    dtype = arguments.dtype or ("fp32" if arguments.device == "cpu" else "bf16")
    return Engine(
        EngineArgs(
            plugin="pi05",
            # pi05_base comes without normalisation statistics. A robot needs them.
            plugin_args=PI05Args(arguments.checkpoint, allow_identity_norm=True),
            config=EngineConfig(DeviceConfig(arguments.device, parse_dtype(dtype))),
        )
    )


def synthetic_observation(model: dict[str, Any]) -> Observation:
    """Return random pictures in the checkpoint's resolution, a zero state and a task."""
    height, width = model["image_resolution"]
    random = np.random.default_rng(0)
    images = {
        camera: random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        for camera in model["cameras"]
    }
    return Observation(images, np.zeros(model["state_dim"], np.float32), "pick up the cup")


def run(arguments: argparse.Namespace) -> None:
    """Load the checkpoint, compute action chunks and print what happened."""
    started = time.perf_counter()
    engine = load_engine(arguments)
    loaded = time.perf_counter() - started
    model = engine.describe()
    print(f"loaded    {model['parameters']:,} parameters in {loaded:.1f} s")
    print(f"weights   {engine.weight_bytes() / 2**20:.1f} MiB")
    print(f"linear    {model['linear_formats']}")
    print(f"policy    {model['policy']['source'] or 'none'}")

    observation = synthetic_observation(model)
    chunk = engine.infer(observation, seed=0, num_steps=arguments.steps)
    print_timing("warm-up", chunk)
    for seed in range(1, RUNS + 1):
        chunk = engine.infer(observation, seed=seed, num_steps=arguments.steps)
        print_timing("run", chunk)
    print(f"prompt    {chunk.prompt!r}")
    print(f"actions   {chunk.actions.shape} {chunk.actions.dtype}")
    print(f"first     {chunk.actions[0].round(3)}")

    chosen = Counter((trace.op, trace.role, trace.selected) for trace in engine.explain())
    for (op, role, kernel), count in sorted(chosen.items()):
        print(f"kernel    {count:4} x {op} {role}  ->  {kernel}")


def print_timing(label: str, chunk: ActionChunk) -> None:
    """Print the milliseconds of each stage."""
    stages = "  ".join(f"{stage} {ms:.1f} ms" for stage, ms in chunk.timing_ms.items())
    print(f"{label:<8}  {stages}")


if __name__ == "__main__":
    try:
        run(parse_arguments())
    except (NoKernelError, ValueError) as error:  # checkpoint, policy, quantization, device
        sys.exit(f"error: {error}")
