"""Write a π0.5 checkpoint of random weights, by default in the full size, for measurements.

    python scripts/write_random_checkpoint.py FOLDER --device cuda

The folder has LeRobot's layout, the tokenizer of the reach example and statistics that leave
numbers as they are. Its actions mean nothing.
"""

import argparse
import importlib
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from phyai.models.pi05.config import PI05Config
from phyai.models.pi05.random_weights import full_size_config

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "pi05"


def random_tensor(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return bf16 values that keep the variance of a layer's input; small ones for vectors."""
    fan_in = max(1, torch.Size(shape[1:]).numel())
    scale = fan_in**-0.5 if len(shape) > 1 else 0.1
    values = torch.randn(shape, generator=generator, device=generator.device)
    return (scale * values).bfloat16().cpu()


def write(folder: Path, config: PI05Config, device: str) -> None:
    """Write the checkpoint of a configuration.

    Args:
        folder: Is made when it does not exist.
        config: Sizes.
        device: Where the numbers are drawn.
    """
    sys.path.insert(0, str(EXAMPLES))
    export, sizes, normalisation = (
        importlib.import_module(f"reach.{name}") for name in ("export", "sizes", "normalisation")
    )
    generator = torch.Generator(device).manual_seed(0)
    shapes = sizes.tensor_shapes(config)
    tensors = {name: random_tensor(shape, generator) for name, shape in shapes.items()}
    ramp = torch.linspace(-1, 1, 101)[:, None] / 0.98
    state, action = (
        normalisation.describe(ramp.expand(-1, dims))
        for dims in (config.state_dim, config.action_dim)
    )
    statistics = normalisation.Statistics(state, action)
    export.export_checkpoint(folder, tensors, config, statistics)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="A π0.5 checkpoint of random weights")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--chunk", type=int, default=50)
    args = parser.parse_args()
    config = replace(full_size_config(chunk=args.chunk), layout="lerobot")
    write(args.folder, config, args.device)
    print(f"{args.folder}: {(args.folder / 'model.safetensors').stat().st_size / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
