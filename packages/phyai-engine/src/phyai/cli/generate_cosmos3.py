"""``phyai run cosmos3``, the modes without actions: pictures, clips and sound from text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from phyai.cli import cosmos3_options as own
from phyai.cli import options
from phyai.cli.cosmos3_files import read_clip, read_text
from phyai.cli.cosmos3_run import Job, Sampler, Targets
from phyai.cli.option_groups import with_groups

_PictureOut = Annotated[Path, typer.Option(help="Picture to write: .png or .jpg.", metavar="FILE")]
_Take = Annotated[
    str, typer.Option(help="Continue its first or its last 5 frames.", metavar="first|last")
]


@dataclass(frozen=True)
class Clip:
    """A clip to make, from what is said about it to its file."""

    prompt: own.Prompt
    out: own.VideoOut
    negative_prompt: own.Negative = ""
    height: own.Height = 720
    width: own.Width = 1280
    frames: own.Frames = 189
    fps: own.Fps = 24.0
    sound: own.Sound = False
    wav: own.Wav = None
    no_metadata: own.NoMetadata = False
    seed: own.Seed = 0
    tiles: own.Tiles = False

    def make(
        self,
        kind: Any,
        checkpoint: Path,
        sampler: Sampler,
        placement: options.Placement,
        *,
        json_output: bool,
        **begins: Any,
    ) -> None:
        """Make it and write it.

        Args:
            kind: Class of the request.
            checkpoint: Repository of the model.
            sampler: Changes to its sampling.
            placement: Devices and precision.
            json_output: Whether to print one JSON document.
            begins: Fields of the request about what the clip begins with.
        """
        fields = {
            "prompt": read_text(self.prompt),
            "negative_prompt": read_text(self.negative_prompt),
            "height": self.height,
            "width": self.width,
            "frames": self.frames,
            "fps": self.fps,
            "sound": self.sound or self.wav is not None,
            "metadata": not self.no_metadata,
            "seed": self.seed,
        }
        Job(
            kind,
            sampler,
            Targets(clip=self.out, sound=self.wav, json=json_output),
            placement.engine(checkpoint, decoder=True, tiles=self.tiles),
            fields | begins,
        ).run()


@with_groups
def run_t2i(
    checkpoint: own.Checkpoint,
    prompt: own.Prompt,
    out: _PictureOut,
    negative_prompt: own.Negative = "",
    height: own.Height = 1024,
    width: own.Width = 1024,
    no_metadata: own.NoMetadata = False,
    seed: own.Seed = 0,
    *,
    sampler: Sampler,
    placement: options.Placement,
    json_output: options.Json = False,
) -> None:
    """Make a picture of a caption."""
    from phyai.models.cosmos3.requests import TextToImageRequest

    Job(
        TextToImageRequest,
        sampler,
        Targets(picture=out, json=json_output),
        placement.engine(checkpoint, decoder=True),
        {
            "prompt": read_text(prompt),
            "negative_prompt": read_text(negative_prompt),
            "height": height,
            "width": width,
            "metadata": not no_metadata,
            "seed": seed,
        },
    ).run()


@with_groups
def run_t2v(
    checkpoint: own.Checkpoint,
    clip: Clip,
    sampler: Sampler,
    placement: options.Placement,
    json_output: options.Json = False,
) -> None:
    """Make a clip of a caption, with sound if asked for.

    Example: phyai run cosmos3 t2v --checkpoint Cosmos3-Nano --prompt @caption.json
    --out clip.mp4 --sound
    """
    from phyai.models.cosmos3.requests import TextToVideoRequest

    clip.make(TextToVideoRequest, checkpoint, sampler, placement, json_output=json_output)


@with_groups
def run_i2v(
    checkpoint: own.Checkpoint,
    image: own.Image,
    clip: Clip,
    sampler: Sampler,
    placement: options.Placement,
    json_output: options.Json = False,
) -> None:
    """Make a clip that begins with a picture."""
    from phyai.cli.images import read_image
    from phyai.models.cosmos3.requests import ImageToVideoRequest

    clip.make(
        ImageToVideoRequest,
        checkpoint,
        sampler,
        placement,
        json_output=json_output,
        image=read_image(image),
    )


@with_groups
def run_v2v(
    checkpoint: own.Checkpoint,
    clip: Annotated[
        Path,
        typer.Option(help="Video file or folder of pictures; 5 frames of it are continued."),
    ],
    made: Clip,
    take: _Take = "last",
    *,
    sampler: Sampler,
    placement: options.Placement,
    json_output: options.Json = False,
) -> None:
    """Make a clip that continues another one."""
    from phyai.models.cosmos3.requests import VideoToVideoRequest

    made.make(
        VideoToVideoRequest,
        checkpoint,
        sampler,
        placement,
        json_output=json_output,
        clip=read_clip(clip, most=5 if take == "first" else None),
        take=take,
    )
