"""``phyai run cosmos3``: actions, clips, pictures and sound of one request."""

from pathlib import Path
from typing import Annotated, Any

import typer

from phyai.cli import cosmos3_options as own
from phyai.cli import engines, options
from phyai.cli.cosmos3_files import read_actions, read_clip, read_normalizer, read_text
from phyai.cli.cosmos3_run import Job, Sampler, Targets
from phyai.cli.errors import CliError, checked
from phyai.cli.generate_cosmos3 import run_i2v, run_t2i, run_t2v, run_v2v

app: typer.Typer = typer.Typer(help="Run Cosmos3 once, in any of its modes.", no_args_is_help=True)

GENERATION = {"t2i": run_t2i, "t2v": run_t2v, "i2v": run_i2v, "v2v": run_v2v}
for _name, _command in GENERATION.items():
    app.command(name=_name)(_command)

_VIEWS = "wrist, exterior_1 and exterior_2, or image for the three in one picture"
_JOINTS = 8


@app.callback()
def _group() -> None:
    """Run Cosmos3 once, in any of its modes.

    A tiny repository of random weights to try them with is written by
    ``python -m phyai.models.cosmos3.random_checkpoint DIR``.
    """


@app.command(name="policy")
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
    steps: own.Steps = None,
    guidance: own.Guidance = None,
    shift: own.Shift = None,
    schedule: own.Schedule = None,
    interval: own.Interval = None,
    video: own.OptionalVideo = None,
    out: own.ActionsOut = None,
    rows: options.Rows = 8,
    device: options.Device = None,
    dtype: options.Dtype = None,
    kernel_config: options.KernelConfigFile = None,
    no_graphs: options.NoGraphs = False,
    cfg_parallel: options.CfgParallel = None,
    tensor_parallel: options.TensorParallel = None,
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
        Sampler(steps, guidance, shift, schedule, interval),
        Targets(clip=video, actions=out, rows=rows, json=json_output),
        engines.EngineRequest(
            checkpoint, device, dtype, kernel_config, decoder=video is not None,
            graphs=not no_graphs, cfg_parallel=cfg_parallel, tensor_parallel=tensor_parallel,
        ),
        {
            "prompt": task,
            "seed": seed,
            "joint_position": numbers[:7],
            "gripper_position": float(numbers[7]),
            "decode_video": video is not None,
            **_views(views),
        },
    ).run()  # fmt: skip


def _views(views: dict[str, Any]) -> dict[str, Any]:
    if set(views) == {"image"}:
        return {"image": views["image"]}
    if set(views) != {"wrist", "exterior_1", "exterior_2"}:
        raise typer.BadParameter(
            f"the pictures are {', '.join(sorted(views))}; give {_VIEWS}", param_hint="--image"
        )
    return {"wrist": views["wrist"], "exteriors": [views["exterior_1"], views["exterior_2"]]}


@app.command(name="world-action")
def run_world_action(
    checkpoint: own.Checkpoint,
    image: own.Image,
    prompt: own.Prompt,
    domain: own.Domain,
    raw_dim: own.RawDim = None,
    chunk: own.Chunk = None,
    fps: own.ActionFps = None,
    tier: own.Tier = None,
    viewpoint: own.View = own.ViewpointName.EGO,
    stats: own.Stats = None,
    normalization: own.Normalization = None,
    seed: own.Seed = 0,
    steps: own.Steps = None,
    guidance: own.Guidance = None,
    shift: own.Shift = None,
    schedule: own.Schedule = None,
    interval: own.Interval = None,
    video: own.OptionalVideo = None,
    out: own.ActionsOut = None,
    rows: options.Rows = 8,
    device: options.Device = None,
    dtype: options.Dtype = None,
    kernel_config: options.KernelConfigFile = None,
    no_graphs: options.NoGraphs = False,
    cfg_parallel: options.CfgParallel = None,
    tensor_parallel: options.TensorParallel = None,
    json_output: options.Json = False,
) -> None:
    """Predict actions and frames of any embodiment from a first frame."""
    from phyai.cli.images import read_image
    from phyai.models.cosmos3.requests import WorldActionRequest

    Job(
        WorldActionRequest,
        Sampler(steps, guidance, shift, schedule, interval),
        Targets(clip=video, actions=out, rows=rows, json=json_output),
        engines.EngineRequest(
            checkpoint, device, dtype, kernel_config, decoder=video is not None,
            graphs=not no_graphs, cfg_parallel=cfg_parallel, tensor_parallel=tensor_parallel,
        ),
        {
            "prompt": read_text(prompt),
            "seed": seed,
            "image": read_image(image),
            "decode_video": video is not None,
            **_embodiment(domain, raw_dim, chunk, fps, tier, viewpoint),
            "normalizer": read_normalizer(stats, normalization),
        },
    ).run()  # fmt: skip


@app.command(name="forward-dynamics")
def run_forward_dynamics(
    checkpoint: own.Checkpoint,
    image: own.Image,
    actions: Annotated[
        Path,
        typer.Option(help="Actions: .npy, .npz, .csv or .json [actions, columns].", metavar="FILE"),
    ],
    prompt: own.Prompt,
    domain: own.Domain,
    out: own.VideoOut,
    raw_dim: own.RawDim = None,
    fps: own.ActionFps = None,
    tier: own.Tier = None,
    viewpoint: own.View = own.ViewpointName.EGO,
    stats: own.Stats = None,
    normalization: own.Normalization = None,
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
    """Predict the frames that follow a first frame under given actions."""
    from phyai.cli.images import read_image
    from phyai.models.cosmos3.requests import ForwardDynamicsRequest

    Job(
        ForwardDynamicsRequest,
        Sampler(steps, guidance, shift, schedule, interval),
        Targets(clip=out, json=json_output),
        engines.EngineRequest(
            checkpoint, device, dtype, kernel_config, decoder=True, tiles=tiles,
            graphs=not no_graphs, cfg_parallel=cfg_parallel, tensor_parallel=tensor_parallel,
        ),
        {
            "prompt": read_text(prompt),
            "seed": seed,
            "image": read_image(image),
            "actions": read_actions(actions),
            **_embodiment(domain, raw_dim, None, fps, tier, viewpoint),
            "normalizer": read_normalizer(stats, normalization),
        },
    ).run()  # fmt: skip


@app.command(name="inverse-dynamics")
def run_inverse_dynamics(
    checkpoint: own.Checkpoint,
    clip: Annotated[
        Path,
        typer.Option(help="Video file, or folder of pictures: 1 and a multiple of 4 frames."),
    ],
    prompt: own.Prompt,
    domain: own.Domain,
    raw_dim: own.RawDim = None,
    chunk: own.Chunk = None,
    fps: own.ActionFps = None,
    tier: own.Tier = None,
    viewpoint: own.View = own.ViewpointName.EGO,
    stats: own.Stats = None,
    normalization: own.Normalization = None,
    seed: own.Seed = 0,
    steps: own.Steps = None,
    guidance: own.Guidance = None,
    shift: own.Shift = None,
    schedule: own.Schedule = None,
    interval: own.Interval = None,
    out: own.ActionsOut = None,
    rows: options.Rows = 8,
    device: options.Device = None,
    dtype: options.Dtype = None,
    kernel_config: options.KernelConfigFile = None,
    no_graphs: options.NoGraphs = False,
    cfg_parallel: options.CfgParallel = None,
    tensor_parallel: options.TensorParallel = None,
    json_output: options.Json = False,
) -> None:
    """Find the actions between the frames of a clip."""
    from phyai.models.cosmos3.requests import InverseDynamicsRequest

    Job(
        InverseDynamicsRequest,
        Sampler(steps, guidance, shift, schedule, interval),
        Targets(actions=out, rows=rows, json=json_output),
        engines.EngineRequest(
            checkpoint, device, dtype, kernel_config, graphs=not no_graphs,
            cfg_parallel=cfg_parallel, tensor_parallel=tensor_parallel,
        ),
        {
            "prompt": read_text(prompt),
            "seed": seed,
            "frames": read_clip(clip, most=None if chunk is None else chunk + 1),
            **_embodiment(domain, raw_dim, chunk, fps, tier, viewpoint),
            "normalizer": read_normalizer(stats, normalization),
        },
    ).run()  # fmt: skip


def _embodiment(
    domain: str,
    raw_dim: int | None,
    chunk: int | None,
    fps: float | None,
    tier: str | None,
    viewpoint: own.ViewpointName,
) -> dict[str, Any]:
    from phyai.models.cosmos3.domains import Viewpoint, find_domain

    try:
        find_domain(domain)
    except ValueError as error:
        raise CliError(str(error)) from None
    given = {"domain": domain, "raw_dim": raw_dim, "chunk": chunk, "fps": fps, "tier": tier}
    return {**given, "viewpoint": Viewpoint(viewpoint)}
