"""``phyai eval``: success of a policy in closed loop."""

from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

from phyai.cli import engines, options
from phyai.cli.output import (
    display_path,
    make_progress,
    print_json,
    print_line,
    print_pairs,
    status_line,
    stdout_to_stderr,
)

MISSES_SHOWN = 10

ReachCheckpoint = Annotated[
    Path | None,
    typer.Option(
        help="Checkpoint of a reach policy. Default: the one of the example.",
        metavar="DIR",
        show_default=False,
    ),
]
Episodes = Annotated[int, typer.Option(help="Number of episodes.", min=1)]
FirstSeed = Annotated[int, typer.Option(help="Seed of the first episode.", min=0)]
Examples = Annotated[
    Path | None,
    typer.Option(
        help="Repository, or its folder examples/pi05. Default: searched from the current "
        "folder and from where phyai is installed.",
        metavar="DIR",
        show_default=False,
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(
        help="Draw the first episode (needs phyai-engine\\[plot]).",
        metavar="PNG",
        show_default=False,
    ),
]

app: typer.Typer = typer.Typer(
    help="Measure the success of a policy in closed loop.", no_args_is_help=True
)


@app.callback()
def _group() -> None:
    """Measure the success of a policy in closed loop."""


@app.command()
def reach(
    checkpoint: ReachCheckpoint = None,
    episodes: Episodes = 100,
    seed: FirstSeed = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    kernel_config: options.KernelConfigFile = None,
    examples: Examples = None,
    picture: Picture = None,
    json_output: options.Json = False,
) -> None:
    """Run reach episodes with fixed seeds: a 2-D pointer that goes to the disc that it is told.

    Example: phyai eval reach --episodes 20 --picture episode.png
    """
    from phyai.cli.plotting import require_matplotlib
    from phyai.cli.reach import (
        CHECKPOINT,
        TimedPolicy,
        draw_episode,
        find_examples,
        import_reach,
        run_episodes,
    )

    folder = find_examples(examples)
    options.require_folder(picture)
    if picture is not None:
        require_matplotlib()
    import_reach(folder, "evaluate")
    request = engines.EngineRequest(
        checkpoint=checkpoint or folder / CHECKPOINT,
        device=device,
        dtype=dtype,
        kernel_config=kernel_config,
    )
    policy = TimedPolicy(engines.build_engine(request))
    with stdout_to_stderr(), make_progress() as progress:
        bar = progress.add_task("episodes", total=episodes)
        results = run_episodes(folder, policy, episodes, seed, lambda: progress.advance(bar))
    if picture is not None:
        with stdout_to_stderr(), status_line("Drawing"):
            draw_episode(folder, policy.engine, seed, picture.expanduser())
    summary = {
        "checkpoint": request.checkpoint,
        **_summary(results, policy.times_ms, seed),
        "picture": picture,
    }
    if json_output:
        print_json(summary)
    else:
        _print_summary(summary)


def _summary(results: list[Any], times_ms: list[float], seed: int) -> dict[str, Any]:
    steps = [result.steps for result in results if result.success]
    return {
        "success_rate": fmean(result.success for result in results),
        "successes": len(steps),
        "episodes": len(results),
        "seed": seed,
        "mean_steps": fmean(steps) if steps else None,
        "median_ms_per_chunk": median(times_ms),
        "results": [asdict(result) for result in results],
    }


def _print_summary(summary: dict[str, Any]) -> None:
    steps = summary["mean_steps"]
    print_pairs(
        [
            (
                "success",
                f"{summary['success_rate']:.1%}  "
                f"({summary['successes']} of {summary['episodes']} episodes, "
                f"seeds from {summary['seed']})",
            ),
            ("steps", "-" if steps is None else f"{steps:.1f} on average when successful"),
            ("chunk", f"{summary['median_ms_per_chunk']:.1f} ms median"),
            *([("picture", display_path(summary["picture"]))] if summary["picture"] else []),
        ]
    )
    misses = [result for result in summary["results"] if not result["success"]]
    for miss in misses[:MISSES_SHOWN]:
        print_line(f"missed   seed {miss['seed']}: {miss['task']}, {miss['distance']:.3f} away")
    if len(misses) > MISSES_SHOWN:
        print_line(f"missed   {len(misses) - MISSES_SHOWN} more (--json lists all)")
