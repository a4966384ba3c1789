"""``phyai run cosmos3``, the modes without actions: pictures, clips and sound from text."""

from pathlib import Path
from typing import Annotated

import typer

from phyai.cli import cosmos3_options as own
from phyai.cli import engines, options
from phyai.cli.cosmos3_files import read_clip, read_text
from phyai.cli.cosmos3_run import Job, Sampler, Targets

_PictureOut = Annotated[Path, typer.Option(help="Picture to write: .png or .jpg.", metavar="FILE")]


def run_t2i(
    checkpoint: own.Checkpoint,
    prompt: own.Prompt,
    out: _PictureOut,
    negative_prompt: own.Negative = "",
    height: own.Height = 1024,
    width: own.Width = 1024,
    no_metadata: own.NoMetadata = False,
    seed: own.Seed = 0,
    steps: own.Steps = None,
    guidance: own.Guidance = None,
    shift: own.Shift = None,
    schedule: own.Schedule = None,
    interval: own.Interval = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    kernel_config: options.KernelConfigFile = None,
    no_graphs: options.NoGraphs = False,
    cfg_parallel: options.CfgParallel = None,
    tensor_parallel: options.TensorParallel = None,
    json_output: options.Json = False,
) -> None:
    """Make a picture of a caption."""
    from phyai.models.cosmos3.requests import TextToImageRequest

    Job(
        TextToImageRequest,
        Sampler(steps, guidance, shift, schedule, interval),
        Targets(picture=out, json=json_output),
        engines.EngineRequest(
            checkpoint, device, dtype, kernel_config, decoder=True, graphs=not no_graphs,
            cfg_parallel=cfg_parallel, tensor_parallel=tensor_parallel,
        ),
        {
            "prompt": read_text(prompt),
            "negative_prompt": read_text(negative_prompt),
            "height": height,
            "width": width,
            "metadata": not no_metadata,
            "seed": seed,
        },
    ).run()  # fmt: skip


def run_t2v(
    checkpoint: own.Checkpoint,
    prompt: own.Prompt,
    out: own.VideoOut,
    negative_prompt: own.Negative = "",
    height: own.Height = 720,
    width: own.Width = 1280,
    frames: own.Frames = 189,
    fps: own.Fps = 24.0,
    sound: own.Sound = False,
    wav: own.Wav = None,
    no_metadata: own.NoMetadata = False,
    seed: own.Seed = 0,
    steps: own.Steps = None,
    guidance: own.Guidance = None,
    shift: own.Shift = None,
    schedule: own.Schedule = None,
    interval: own.Interval = None,
    tiles: own.Tiles = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    kernel_config: options.KernelConfigFile = None,
    no_graphs: options.NoGraphs = False,
    cfg_parallel: options.CfgParallel = None,
    tensor_parallel: options.TensorParallel = None,
    json_output: options.Json = False,
) -> None:
    """Make a clip of a caption, with sound if asked for.

    Example: phyai run cosmos3 t2v --checkpoint Cosmos3-Nano --prompt @caption.json
    --out clip.mp4 --sound
    """
    from phyai.models.cosmos3.requests import TextToVideoRequest

    Job(
        TextToVideoRequest,
        Sampler(steps, guidance, shift, schedule, interval),
        Targets(clip=out, sound=wav, json=json_output),
        engines.EngineRequest(
            checkpoint, device, dtype, kernel_config, decoder=True, tiles=tiles,
            graphs=not no_graphs, cfg_parallel=cfg_parallel, tensor_parallel=tensor_parallel,
        ),
        {
            "prompt": read_text(prompt),
            "negative_prompt": read_text(negative_prompt),
            "height": height,
            "width": width,
            "frames": frames,
            "fps": fps,
            "sound": sound or wav is not None,
            "metadata": not no_metadata,
            "seed": seed,
        },
    ).run()  # fmt: skip


def run_i2v(
    checkpoint: own.Checkpoint,
    image: own.Image,
    prompt: own.Prompt,
    out: own.VideoOut,
    negative_prompt: own.Negative = "",
    height: own.Height = 720,
    width: own.Width = 1280,
    frames: own.Frames = 189,
    fps: own.Fps = 24.0,
    sound: own.Sound = False,
    wav: own.Wav = None,
    no_metadata: own.NoMetadata = False,
    seed: own.Seed = 0,
    steps: own.Steps = None,
    guidance: own.Guidance = None,
    shift: own.Shift = None,
    schedule: own.Schedule = None,
    interval: own.Interval = None,
    tiles: own.Tiles = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    kernel_config: options.KernelConfigFile = None,
    no_graphs: options.NoGraphs = False,
    cfg_parallel: options.CfgParallel = None,
    tensor_parallel: options.TensorParallel = None,
    json_output: options.Json = False,
) -> None:
    """Make a clip that begins with a picture."""
    from phyai.cli.images import read_image
    from phyai.models.cosmos3.requests import ImageToVideoRequest

    Job(
        ImageToVideoRequest,
        Sampler(steps, guidance, shift, schedule, interval),
        Targets(clip=out, sound=wav, json=json_output),
        engines.EngineRequest(
            checkpoint, device, dtype, kernel_config, decoder=True, tiles=tiles,
            graphs=not no_graphs, cfg_parallel=cfg_parallel, tensor_parallel=tensor_parallel,
        ),
        {
            "prompt": read_text(prompt),
            "negative_prompt": read_text(negative_prompt),
            "image": read_image(image),
            "height": height,
            "width": width,
            "frames": frames,
            "fps": fps,
            "sound": sound or wav is not None,
            "metadata": not no_metadata,
            "seed": seed,
        },
    ).run()  # fmt: skip


def run_v2v(
    checkpoint: own.Checkpoint,
    clip: Annotated[
        Path,
        typer.Option(help="Video file or folder of pictures; 5 frames of it are continued."),
    ],
    prompt: own.Prompt,
    out: own.VideoOut,
    take: Annotated[
        str, typer.Option(help="Continue its first or its last 5 frames.", metavar="first|last")
    ] = "last",
    negative_prompt: own.Negative = "",
    height: own.Height = 720,
    width: own.Width = 1280,
    frames: own.Frames = 189,
    fps: own.Fps = 24.0,
    sound: own.Sound = False,
    wav: own.Wav = None,
    no_metadata: own.NoMetadata = False,
    seed: own.Seed = 0,
    steps: own.Steps = None,
    guidance: own.Guidance = None,
    shift: own.Shift = None,
    schedule: own.Schedule = None,
    interval: own.Interval = None,
    tiles: own.Tiles = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    kernel_config: options.KernelConfigFile = None,
    no_graphs: options.NoGraphs = False,
    cfg_parallel: options.CfgParallel = None,
    tensor_parallel: options.TensorParallel = None,
    json_output: options.Json = False,
) -> None:
    """Make a clip that continues another one."""
    from phyai.models.cosmos3.requests import VideoToVideoRequest

    Job(
        VideoToVideoRequest,
        Sampler(steps, guidance, shift, schedule, interval),
        Targets(clip=out, sound=wav, json=json_output),
        engines.EngineRequest(
            checkpoint, device, dtype, kernel_config, decoder=True, tiles=tiles,
            graphs=not no_graphs, cfg_parallel=cfg_parallel, tensor_parallel=tensor_parallel,
        ),
        {
            "prompt": read_text(prompt),
            "negative_prompt": read_text(negative_prompt),
            "clip": read_clip(clip, most=5 if take == "first" else None),
            "take": take,
            "height": height,
            "width": width,
            "frames": frames,
            "fps": fps,
            "sound": sound or wav is not None,
            "metadata": not no_metadata,
            "seed": seed,
        },
    ).run()  # fmt: skip
