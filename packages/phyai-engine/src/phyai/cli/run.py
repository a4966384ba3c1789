"""``phyai run``: one action chunk from a checkpoint and one observation."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from phyai.cli import engines, options, run_cosmos3
from phyai.cli.errors import checked
from phyai.cli.output import (
    display_path,
    one_line,
    print_actions,
    print_json,
    print_line,
    print_pairs,
    status_line,
    stdout_to_stderr,
)

if TYPE_CHECKING:
    from phyai.engine import ActionChunk, Engine

app: typer.Typer = typer.Typer(help="Run a model once.", no_args_is_help=True)
app.add_typer(run_cosmos3.app, name="cosmos3")


@dataclass(frozen=True)
class RunOutput:
    """Where and how the result of ``phyai run`` is shown."""

    rows: int
    plot: Path | None
    out: Path | None
    json: bool


@app.callback()
def _group() -> None:
    """Run a model once: a policy on pictures, a state and a task, or a generator on a text."""


@app.command(name="pi05")
def run_pi05(
    checkpoint: options.Checkpoint,
    image: options.Images,
    task: options.Task,
    state: options.State = None,
    seed: options.Seed = 0,
    steps: options.Steps = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    preset: options.Preset = None,
    stats: options.Stats = None,
    tokenizer: options.Tokenizer = None,
    allow_identity_norm: options.AllowIdentityNorm = False,
    kernel_config: options.KernelConfigFile = None,
    no_savings: options.NoSavings = False,
    no_graphs: options.NoGraphs = False,
    rows: options.Rows = 8,
    plot: options.Plot = None,
    out: options.Out = None,
    json_output: options.Json = False,
) -> None:
    """Run π0.5 once and print the action chunk.

    Example: phyai run pi05 --checkpoint pi05_libero --image base_0_rgb=scene.jpg
    --task "pick up the cup" --state "0,0,0,0,0,0,0,0"
    """
    from phyai.cli.images import parse_images, parse_state, read_image
    from phyai.cli.plotting import require_matplotlib

    files = checked("--image", parse_images, image)
    numbers = None if state is None else checked("--state", parse_state, state)
    for target in (plot, out):
        options.require_folder(target)
    if plot is not None:
        require_matplotlib()
    pictures = {name: read_image(path) for name, path in files.items()}
    request = engines.EngineRequest(
        checkpoint=checkpoint,
        device=device,
        dtype=dtype,
        kernel_config=kernel_config,
        preset=preset,
        stats=stats,
        tokenizer=tokenizer,
        allow_identity_norm=allow_identity_norm,
        savings=not no_savings,
        graphs=not no_graphs,
    )
    from phyai.processing import Observation

    started = time.perf_counter()
    engine = engines.build_engine(request)
    load_ms = (time.perf_counter() - started) * 1e3
    observation = Observation(images=pictures, state=numbers, task=task)
    with stdout_to_stderr(), status_line("Computing actions"):
        chunk = engine.infer(observation, seed=seed, num_steps=steps)
    output = RunOutput(rows, plot, out, json_output)
    _report(engine, chunk, {"load": load_ms, **chunk.timing_ms}, seed, output)


def _report(
    engine: "Engine",
    chunk: "ActionChunk",
    timing_ms: Mapping[str, float],
    seed: int,
    output: RunOutput,
) -> None:
    description = engine.describe()
    preset = description["processing"]["preset"]
    if output.out is not None:
        _save(chunk, seed, output.out.expanduser())
    if output.plot is not None:
        from phyai.cli.plotting import plot_actions

        plot_actions(chunk.actions, output.plot.expanduser(), title=chunk.prompt.strip())
    if output.json:
        print_json(
            {
                "actions": chunk.actions,
                "shape": chunk.actions.shape,
                "prompt": chunk.prompt,
                "preset": preset,
                "seed": seed,
                "timing_ms": timing_ms,
                "weight_bytes": engine.weight_bytes(),
                "engine": description,
                "out": output.out,
                "plot": output.plot,
            }
        )
        return
    _print_chunk(chunk, preset, timing_ms, seed, output)


def _print_chunk(
    chunk: "ActionChunk",
    preset: object,
    timing_ms: Mapping[str, float],
    seed: int,
    output: RunOutput,
) -> None:
    steps, dims = chunk.actions.shape
    print_pairs(
        [
            ("preset", preset),
            ("prompt", one_line(chunk.prompt)),
            ("actions", f"{steps} steps x {dims} dimensions, robot units, seed {seed}"),
        ]
    )
    print_line()
    print_actions(chunk.actions, output.rows)
    print_line()
    timing = ", ".join(f"{name} {value:.1f} ms" for name, value in timing_ms.items())
    print_pairs([("timing", timing)])
    for label, path in (("saved", output.out), ("plot", output.plot)):
        if path is not None:
            print_pairs([(f"{label:<6}", display_path(path.expanduser()))])


def _save(chunk: "ActionChunk", seed: int, path: Path) -> None:
    import numpy as np

    # A file object keeps the name as given; numpy appends .npz to a bare path.
    with path.open("wb") as file:
        np.savez(
            file,
            actions=chunk.actions,
            normalized=chunk.normalized,
            prompt=np.array(chunk.prompt),
            seed=np.array(seed),
        )
