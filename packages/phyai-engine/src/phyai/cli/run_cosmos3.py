"""``phyai run cosmos3``: actions, clips, pictures and sound of one request."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from phyai.cli import cosmos3_options as own
from phyai.cli import options
from phyai.cli.cosmos3_files import read_actions, read_clip, read_normalizer, read_text
from phyai.cli.cosmos3_run import Job, Sampler, Targets
from phyai.cli.errors import CliError, checked
from phyai.cli.generate_cosmos3 import run_i2v, run_t2i, run_t2v, run_v2v
from phyai.cli.option_groups import with_groups

app: typer.Typer = typer.Typer(help="Run Cosmos3 once, in any of its modes.", no_args_is_help=True)

GENERATION = {"t2i": run_t2i, "t2v": run_t2v, "i2v": run_i2v, "v2v": run_v2v}
for _name, _command in GENERATION.items():
    app.command(name=_name)(_command)

_VIEWS = "wrist, exterior_1 and exterior_2, or image for the three in one picture"
_JOINTS = 8


@dataclass(frozen=True)
class Embodiment:
    """A body that acts, and how its actions and pictures are given."""

    domain: own.Domain
    raw_dim: own.RawDim = None
    fps: own.ActionFps = None
    tier: own.Tier = None
    viewpoint: own.View = own.ViewpointName.EGO
    stats: own.Stats = None
    normalization: own.Normalization = None

    def fields(self) -> dict[str, Any]:
        """Return what a request holds about it.

        Raises:
            CliError: No such domain, or its statistics can not be used.
        """
        from phyai.models.cosmos3.domains import Viewpoint, find_domain

        try:
            find_domain(self.domain)
        except ValueError as error:
            raise CliError(str(error)) from None
        return {
            "domain": self.domain,
            "raw_dim": self.raw_dim,
            "fps": self.fps,
            "tier": self.tier,
            "viewpoint": Viewpoint(self.viewpoint),
            "normalizer": read_normalizer(self.stats, self.normalization),
        }


@app.callback()
def _group() -> None:
    """Run Cosmos3 once, in any of its modes.

    A tiny repository of random weights to try them with is written by
    ``python -m phyai.models.cosmos3.random_checkpoint DIR``.
    """


@app.command(name="policy")
@with_groups
def run_policy(
    checkpoint: own.Checkpoint,
    image: Annotated[
        list[str],
        typer.Option(help=f"A camera and its picture: {_VIEWS}.", metavar="NAME=FILE"),
    ],
    task: options.Task,
    state: Annotated[
        str,
        typer.Option(help="7 joint positions and the gripper, 0 open to 1 closed."),
    ],
    seed: own.Seed = 0,
    *,
    sampler: Sampler,
    video: own.OptionalVideo = None,
    out: own.ActionsOut = None,
    rows: options.Rows = 8,
    placement: options.Placement,
    json_output: options.Json = False,
) -> None:
    """Answer one observation of a DROID robot with a chunk of joint positions.

    Example: phyai run cosmos3 policy --checkpoint Cosmos3-Nano-Policy-DROID --image wrist=w.jpg
    --image exterior_1=a.jpg --image exterior_2=b.jpg --task "put the cup on the plate"
    --state "0,-0.6,0,-2.5,0,1.9,0,0"
    """
    from phyai.cli.images import parse_images, parse_state, read_image
    from phyai.models.cosmos3.requests import PolicyRequest

    files = checked("--image", parse_images, image)
    numbers = checked("--state", parse_state, state)
    if len(numbers) != _JOINTS:
        raise typer.BadParameter(
            f"{len(numbers)} numbers; give 7 joint positions and the gripper", param_hint="--state"
        )
    views = {name: read_image(path) for name, path in files.items()}
    Job(
        PolicyRequest,
        sampler,
        Targets(clip=video, actions=out, rows=rows, json=json_output),
        placement.engine(checkpoint, decoder=video is not None),
        {
            "prompt": task,
            "seed": seed,
            "joint_position": numbers[:7],
            "gripper_position": float(numbers[7]),
            "decode_video": video is not None,
            **_views(views),
        },
    ).run()


def _views(views: dict[str, Any]) -> dict[str, Any]:
    if set(views) == {"image"}:
        return {"image": views["image"]}
    if set(views) != {"wrist", "exterior_1", "exterior_2"}:
        raise typer.BadParameter(
            f"the pictures are {', '.join(sorted(views))}; give {_VIEWS}", param_hint="--image"
        )
    return {"wrist": views["wrist"], "exteriors": [views["exterior_1"], views["exterior_2"]]}


@app.command(name="world-action")
@with_groups
def run_world_action(
    checkpoint: own.Checkpoint,
    image: own.Image,
    prompt: own.Prompt,
    embodiment: Embodiment,
    chunk: own.Chunk = None,
    seed: own.Seed = 0,
    *,
    sampler: Sampler,
    video: own.OptionalVideo = None,
    out: own.ActionsOut = None,
    rows: options.Rows = 8,
    placement: options.Placement,
    json_output: options.Json = False,
) -> None:
    """Predict actions and frames of any embodiment from a first frame."""
    from phyai.cli.images import read_image
    from phyai.models.cosmos3.requests import WorldActionRequest

    Job(
        WorldActionRequest,
        sampler,
        Targets(clip=video, actions=out, rows=rows, json=json_output),
        placement.engine(checkpoint, decoder=video is not None),
        {
            "prompt": read_text(prompt),
            "seed": seed,
            "image": read_image(image),
            "decode_video": video is not None,
            "chunk": chunk,
            **embodiment.fields(),
        },
    ).run()


@app.command(name="forward-dynamics")
@with_groups
def run_forward_dynamics(
    checkpoint: own.Checkpoint,
    image: own.Image,
    actions: Annotated[
        Path,
        typer.Option(help="Actions: .npy, .npz, .csv or .json [actions, columns].", metavar="FILE"),
    ],
    prompt: own.Prompt,
    embodiment: Embodiment,
    out: own.VideoOut,
    seed: own.Seed = 0,
    *,
    sampler: Sampler,
    tiles: own.Tiles = False,
    placement: options.Placement,
    json_output: options.Json = False,
) -> None:
    """Predict the frames that follow a first frame under given actions."""
    from phyai.cli.images import read_image
    from phyai.models.cosmos3.requests import ForwardDynamicsRequest

    Job(
        ForwardDynamicsRequest,
        sampler,
        Targets(clip=out, json=json_output),
        placement.engine(checkpoint, decoder=True, tiles=tiles),
        {
            "prompt": read_text(prompt),
            "seed": seed,
            "image": read_image(image),
            "actions": read_actions(actions),
            **embodiment.fields(),
        },
    ).run()


@app.command(name="inverse-dynamics")
@with_groups
def run_inverse_dynamics(
    checkpoint: own.Checkpoint,
    clip: Annotated[
        Path,
        typer.Option(help="Video file, or folder of pictures: 1 and a multiple of 4 frames."),
    ],
    prompt: own.Prompt,
    embodiment: Embodiment,
    chunk: own.Chunk = None,
    seed: own.Seed = 0,
    *,
    sampler: Sampler,
    out: own.ActionsOut = None,
    rows: options.Rows = 8,
    placement: options.Placement,
    json_output: options.Json = False,
) -> None:
    """Find the actions between the frames of a clip."""
    from phyai.models.cosmos3.requests import InverseDynamicsRequest

    Job(
        InverseDynamicsRequest,
        sampler,
        Targets(actions=out, rows=rows, json=json_output),
        placement.engine(checkpoint),
        {
            "prompt": read_text(prompt),
            "seed": seed,
            "frames": read_clip(clip, most=None if chunk is None else chunk + 1),
            "chunk": chunk,
            **embodiment.fields(),
        },
    ).run()
