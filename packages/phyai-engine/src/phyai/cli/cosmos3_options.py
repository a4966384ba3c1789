"""Options that the commands about Cosmos3 share."""

import enum
from pathlib import Path
from typing import Annotated

import typer


class ViewpointName(enum.StrEnum):
    """Names of ``phyai.models.cosmos3.domains.Viewpoint``, which takes seconds to import."""

    EGO = "ego_view"
    THIRD_PERSON = "third_person_view"
    WRIST = "wrist_view"
    CONCAT = "concat_view"


Checkpoint = Annotated[
    Path,
    typer.Option(
        help="Repository in the layout of diffusers: transformer/, vae/, text_tokenizer/, ...",
        metavar="DIR",
    ),
]
Prompt = Annotated[
    str, typer.Option(help="Caption or instruction; @FILE reads it from a file.", metavar="TEXT")
]
Negative = Annotated[
    str,
    typer.Option(help="What guidance leads away from; @FILE reads it from a file.", metavar="TEXT"),
]
Seed = Annotated[int, typer.Option(help="Seed of the noise.", min=0, max=2**32 - 1)]
Steps = Annotated[
    int | None,
    typer.Option(
        help="Steps of the sampler. Default: those of the mode.", min=1, show_default=False
    ),
]
Guidance = Annotated[
    float | None,
    typer.Option(
        help="Weight of guidance; 1 computes one branch. Default: that of the mode.",
        min=0.0,
        show_default=False,
    ),
]
Shift = Annotated[
    float | None,
    typer.Option(
        help="Larger values spend more steps on high noise. Default: that of the mode.",
        show_default=False,
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        help="native, or karras as in the scheduler file of Nano. Default: native.",
        metavar="NAME",
        show_default=False,
    ),
]
Interval = Annotated[
    str | None,
    typer.Option(
        help='Guide only steps whose timestep is between two numbers, e.g. "960,1001".',
        metavar="LOW,HIGH",
        show_default=False,
    ),
]
NormalizeCfg = Annotated[
    bool | None,
    typer.Option(
        "--normalize-cfg",
        help="Scale guided velocities down to at most the norm of unguided ones.",
        show_default=False,
    ),
]
Domain = Annotated[str, typer.Option(help="Embodiment, e.g. bridge_orig_lerobot.", metavar="NAME")]
RawDim = Annotated[
    int | None,
    typer.Option(
        help="Columns of an action. Default: those of the domain.", min=1, show_default=False
    ),
]
Chunk = Annotated[
    int | None,
    typer.Option(
        help="Actions, a multiple of 4. Default: those of the domain.", min=4, show_default=False
    ),
]
ActionFps = Annotated[
    float | None,
    typer.Option(help="Actions a second. Default: those of the domain.", show_default=False),
]
Tier = Annotated[
    str | None,
    typer.Option(
        help="Size of the canvas: 256, 480, 704 or 720. Default: that of the domain.",
        metavar="TIER",
        show_default=False,
    ),
]
View = Annotated[ViewpointName, typer.Option("--viewpoint", help="Where the camera is.")]
Stats = Annotated[
    Path | None,
    typer.Option(
        help="JSON with statistics of the actions, e.g. min and max; needs --normalization.",
        metavar="FILE",
        show_default=False,
    ),
]
Normalization = Annotated[
    str | None,
    typer.Option(
        help="How statistics scale actions: minmax, quantile, quantile_rot, meanstd, asinh_...",
        metavar="KIND",
        show_default=False,
    ),
]
Image = Annotated[Path, typer.Option(help="The first frame.", metavar="FILE")]
Height = Annotated[int, typer.Option(help="Pixels, a multiple of 16.", min=16)]
Width = Annotated[int, typer.Option(help="Pixels, a multiple of 16.", min=16)]
Frames = Annotated[int, typer.Option(help="Frames, 1 and a multiple of 4.", min=5)]
Fps = Annotated[float, typer.Option(help="Frames a second.")]
Sound = Annotated[
    bool, typer.Option("--sound", help="Generate sound too; it becomes part of a video file.")
]
Wav = Annotated[
    Path | None,
    typer.Option(
        help="Also write the sound to this file; turns --sound on.",
        metavar="FILE",
        show_default=False,
    ),
]
NoMetadata = Annotated[
    bool,
    typer.Option(
        "--no-metadata",
        help="Do not add sentences about length and resolution. JSON captions never get them.",
    ),
]
Tiles = Annotated[
    bool,
    typer.Option("--tiles", help="Decode frames in overlapping tiles, which need less memory."),
]
VideoOut = Annotated[
    Path,
    typer.Option(
        help="Clip to write: .mp4, .mov or .mkv (needs phyai-engine\\[video]), or a folder that "
        "gets one PNG for each frame.",
        metavar="FILE|DIR",
    ),
]
OptionalVideo = Annotated[
    Path | None,
    typer.Option(
        "--video",
        help="Also decode the predicted frames and write them, like --out of t2v.",
        metavar="FILE|DIR",
        show_default=False,
    ),
]
ActionsOut = Annotated[
    Path | None,
    typer.Option(
        help="Save actions, normalized, prompt and seed.", metavar="NPZ", show_default=False
    ),
]
