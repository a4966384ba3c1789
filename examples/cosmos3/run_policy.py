"""Ask a Cosmos3 policy for joint positions, twice, and write the frames that it expects.

python -m phyai.models.cosmos3.random_checkpoint tiny
python examples/cosmos3/run_policy.py --checkpoint tiny --device cpu --steps 1
PHYAI_KERNEL_CONFIG=examples/cosmos3/kernel_policies/cosmos3_h200_fp8.yaml \
    python examples/cosmos3/run_policy.py --checkpoint Cosmos3-Nano-Policy-DROID --video future.mp4
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

from phyai.checkpoints import CheckpointError
from phyai.dispatch import NoKernelError
from phyai.engine import ActionChunk, Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig, ParallelConfig
from phyai.models.cosmos3.main_cosmos3 import Cosmos3Args
from phyai.processing import Observation
from phyai.processing.video import check_target, write_video


def parse_arguments() -> argparse.Namespace:
    """Return the command line; the GPU is the default where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="Ask a Cosmos3 policy for joint positions.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="repository")
    parser.add_argument("--device", default=device, help="cpu or cuda:N (default: %(default)s)")
    parser.add_argument("--task", default="put the red cup on the plate")
    parser.add_argument("--steps", type=int, help="steps of the sampler (default: the contract's)")
    parser.add_argument("--video", type=Path, help="write the predicted frames to this .mp4")
    parser.add_argument("--cfg", type=int, default=1, help="2 divides guidance among two GPUs")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that divide the weights")
    return parser.parse_args()


def load_engine(arguments: argparse.Namespace) -> Engine:
    """Return an engine; the kernel policy comes from PHYAI_KERNEL_CONFIG."""
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    return Engine(
        EngineArgs(
            plugin="cosmos3_policy",
            # A policy loads the VAE's encoder alone unless frames are wanted.
            plugin_args=Cosmos3Args(arguments.checkpoint, decoder=arguments.video is not None),
            config=EngineConfig(
                DeviceConfig(arguments.device, dtype),
                parallel=ParallelConfig(cfg=arguments.cfg, tp=arguments.tp),
            ),
        )
    )


def observe(task: str, seed: int) -> Observation:
    """Return what a DROID robot would send: three views, 7 joints and the gripper, a task."""
    random = np.random.default_rng(seed)
    views = ("wrist", "exterior_1", "exterior_2")
    images = {name: random.integers(0, 256, (360, 640, 3), dtype=np.uint8) for name in views}
    state = np.array([0.0, -0.6, 0.0, -2.5, 0.0, 1.9, 0.0, 0.0], np.float32)
    return Observation(images, state, task)


def run(arguments: argparse.Namespace) -> None:
    """Load the checkpoint, ask twice, and print what happened."""
    if arguments.video is not None:
        check_target(arguments.video)
    started = time.perf_counter()
    engine = load_engine(arguments)
    model = engine.describe()
    print(f"loaded   {model['variant']} in {time.perf_counter() - started:.1f} s")
    print(f"weights  {engine.weight_bytes() / 2**20:.1f} MiB on each of {model['ranks']} devices")
    for seed in (1, 2):
        # The second request finds its text read, and on a GPU its graphs recorded.
        chunk: ActionChunk = engine.infer(
            observe(arguments.task, seed),
            seed=seed,
            num_steps=arguments.steps,
            video=arguments.video is not None and seed == 2,
        )
        stages = "  ".join(f"{stage} {ms:.1f}" for stage, ms in chunk.timing_ms.items())
        print(f"ms       {stages}")
    print(f"prompt   {chunk.prompt[:80]!r}...")
    print(f"actions  {chunk.actions.shape}, at {model['fps']:g} a second")
    print(f"first    {chunk.actions[0].round(3)}")
    if arguments.video is not None and chunk.video is not None:
        write_video(arguments.video, chunk.video, model["fps"])
        print(f"video    {chunk.video.shape[0]} frames in {arguments.video}")
    engine.close()


if __name__ == "__main__":
    try:
        run(parse_arguments())
    except (CheckpointError, NoKernelError, ValueError) as error:
        sys.exit(f"error: {error}")
