"""``phyai bench``: latency of a full-size model of random weights against the floor."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from phyai.cli import engines, options
from phyai.cli.bench_cosmos3 import bench_cosmos3
from phyai.cli.errors import CliError
from phyai.cli.output import (
    make_table,
    print_json,
    print_line,
    print_table,
    status_line,
    stdout_to_stderr,
)

app: typer.Typer = typer.Typer(help="Time a policy stage by stage.", no_args_is_help=True)
app.command(name="cosmos3")(bench_cosmos3)

Batches = Annotated[
    list[int] | None,
    typer.Option(
        "--batch",
        help="Also time this many requests at once with 3 views and 200 prompt tokens. Repeat "
        "for several sizes.",
        metavar="N",
        min=1,
        max=32,
        show_default=False,
    ),
]
Replays = Annotated[int, typer.Option(help="Replays of each graph.", min=1)]
Kernels = Annotated[
    int, typer.Option(help="List this many kernels of each stage by their time.", min=0)
]


@app.callback()
def _group() -> None:
    """Time a policy stage by stage."""


@app.command(name="pi05")
def bench_pi05(
    device: options.Device = None,
    kernel_config: options.KernelConfigFile = None,
    batch: Batches = None,
    replays: Replays = 200,
    kernels: Kernels = 0,
    json_output: options.Json = False,
) -> None:
    """Time π0.5 of random weights in the three settings with published latencies.

    Vision tower, language model and Euler loop are replayed as CUDA graphs and timed by events. The
    floor is the work over what an H200 reaches in bf16.

    Example: phyai bench pi05 --kernel-config examples/pi05/kernel_policies/pi05_h200_fast.yaml
    """
    from phyai.models.pi05.bench import ANCHORS, Setting, measure_all

    target = engines.resolve_device(device)
    if not target.startswith("cuda"):
        raise CliError(
            f"this benchmark times CUDA graphs and the device is {target}",
            "run it on a machine with an NVIDIA GPU",
        )
    settings = [*ANCHORS]
    settings += [Setting(f"batch {size}", 3, 200, batch=size) for size in batch or ()]
    with stdout_to_stderr(), status_line("Building and timing"):
        results = list(
            measure_all(settings, target, kernel_config, replays=replays, kernels=kernels)
        )
    if json_output:
        print_json({"results": results})
        return
    show(results)


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """Print one row for each setting, and the longest kernels where they were listed."""
    table = make_table(
        "setting", "vision", "prefix", "denoise", "chunk p50", "p99", "floor", "ratio", "kernels",
        numbers=True,
    )  # fmt: skip
    for result in results:
        spent, floor = result["ms"], result["floor_ms"]
        table.add_row(
            result["setting"]["name"],
            *(f"{spent[stage]['p50']:.2f}" for stage in ("vision", "prefix", "denoise", "chunk")),
            f"{spent['chunk']['p99']:.2f}",
            f"{floor['total']:.2f}",
            f"{result['ratio']['total']:.2f}",
            str(sum(result["kernels"].values())),
        )
    print_table(table)
    print_line("milliseconds on the device; request p50 from host to host:")
    for result in results:
        print_line(f"  {result['setting']['name']}: {result['ms']['request']['p50']:.2f}")
        for stage, rows in result.get("longest", {}).items():
            for name, count, spent in rows:
                print_line(f"    {stage:<8} {spent:9.1f} us {count:5d} x  {name[:100]}")
