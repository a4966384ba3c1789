"""Compare the engine with a chunk that LeRobot computed on the same observation and noise.

    python scripts/compare_with_lerobot.py CHECKPOINT chunk.safetensors

``chunk.safetensors`` is what ``check_lerobot_loads.py --output`` wrote. Runs on the CPU in fp32.
Exit status 1 when a normalised action is off by more than the tolerance.
"""

import argparse
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.models.pi05.main_pi05 import PI05Args
from phyai.processing import Observation

TOLERANCE = 1e-4  # on normalised actions, which are of the order of 1


def compare(checkpoint: Path, chunk: Path, tolerance: float) -> bool:
    """Print the largest differences; return whether they are within ``tolerance``."""
    tensors = load_file(chunk)
    with safe_open(chunk, framework="pt") as file:
        task = file.metadata()["task"]
    images = {
        name.removeprefix("image."): value.numpy()
        for name, value in tensors.items()
        if name.startswith("image.")
    }
    config = EngineConfig(device=DeviceConfig("cpu", torch.float32))
    args = EngineArgs("pi05", PI05Args(checkpoint_dir=checkpoint), config)
    observation = Observation(images, tensors["state"].numpy(), task)
    answer = Engine(args).infer(observation, noise=tensors["noise"][None])
    expected = tensors["normalized_actions"]
    found = torch.from_numpy(answer.normalized)[:, : expected.shape[1]]
    normalized = (found - expected).abs().max().item()
    robot = (torch.from_numpy(answer.actions) - tensors["actions"]).abs().max().item()
    print(f"prompt: {answer.prompt!r}")
    print(f"largest difference: {normalized:.2e} normalised, {robot:.2e} in robot units")
    return normalized <= tolerance


def main() -> int:
    """Run the comparison; return the exit status."""
    parser = argparse.ArgumentParser(description="Compare the engine with a LeRobot chunk.")
    parser.add_argument("checkpoint", type=Path, help="folder of the checkpoint")
    parser.add_argument("chunk", type=Path, help="file that check_lerobot_loads.py wrote")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    arguments = parser.parse_args()
    if compare(arguments.checkpoint, arguments.chunk, arguments.tolerance):
        return 0
    print(f"error: the engine and LeRobot differ by more than {arguments.tolerance:g}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
