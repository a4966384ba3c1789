"""Make a clip with sound of a caption, and a clip that begins with its first frame.

python -m phyai.models.cosmos3.random_checkpoint tiny
python examples/cosmos3/run_generate.py --checkpoint tiny --device cpu --out clips \
    --height 64 --width 96 --frames 9 --steps 2
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from phyai.checkpoints import CheckpointError
from phyai.dispatch import NoKernelError
from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.models.cosmos3.main_cosmos3 import Cosmos3Args
from phyai.models.cosmos3.repository import Repository
from phyai.models.cosmos3.requests import ImageToVideoRequest, TextToVideoRequest
from phyai.models.cosmos3.results import VideoResult
from phyai.processing.video import require_video, write_video


def parse_arguments() -> argparse.Namespace:
    """Return the command line; the defaults are the published ones."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="Make clips with Cosmos3.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="repository")
    parser.add_argument("--device", default=device, help="cpu or cuda:N (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder for clips and picture")
    parser.add_argument("--prompt", default="A red cup slides over a table and falls.")
    parser.add_argument("--height", type=int, default=720)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--frames", type=int, default=189, help="1 and a multiple of 4")
    parser.add_argument("--steps", type=int, help="steps of the sampler (default: 35)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def save(result: VideoResult, path: Path) -> None:
    """Write a clip, with its sound where it has one."""
    write_video(path, result.frames, result.fps, sound=result.sound, sample_rate=result.sample_rate)
    heard = "" if result.sound is None else " with sound"
    stages = "  ".join(f"{stage} {ms:.0f}" for stage, ms in result.timing_ms.items())
    print(f"{path}: {len(result.frames)} frames{heard}; ms {stages}")


def run(arguments: argparse.Namespace) -> None:
    """Load the checkpoint once and make two clips."""
    require_video()
    arguments.out.mkdir(parents=True, exist_ok=True)
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    repository = Repository.read(arguments.checkpoint)
    engine = Engine(
        EngineArgs(
            "cosmos3",
            Cosmos3Args(arguments.checkpoint),
            EngineConfig(DeviceConfig(arguments.device, dtype)),
        )
    )
    request = TextToVideoRequest(
        prompt=arguments.prompt,
        height=arguments.height,
        width=arguments.width,
        frames=arguments.frames,
        sound=repository.sound,
        seed=arguments.seed,
        sampling=repository.sampling(TextToVideoRequest, steps=arguments.steps),
    )
    clip = engine.run(request)
    save(clip, arguments.out / "text.mp4")
    Image.fromarray(clip.frames[0]).save(arguments.out / "first.png")
    again = ImageToVideoRequest(
        image=clip.frames[0], **{name: getattr(request, name) for name in vars(request)}
    )
    save(engine.run(replace(again, seed=arguments.seed + 1)), arguments.out / "image.mp4")


if __name__ == "__main__":
    try:
        run(parse_arguments())
    except (CheckpointError, NoKernelError, ValueError) as error:
        sys.exit(f"error: {error}")
