"""``phyai convert``: checkpoints of other programs in a layout that the engine loads."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from phyai.cli import options
from phyai.cli.output import print_json, print_pairs, status_line

app: typer.Typer = typer.Typer(
    name="convert",
    help="Convert checkpoints into a layout that the engine loads.",
    no_args_is_help=True,
)


class StoredDtype(StrEnum):
    """Precision of written tensors."""

    BF16 = "bf16"
    FP32 = "fp32"


@app.callback()
def _group() -> None:
    """Convert checkpoints into a layout that the engine loads."""


@app.command(name="openpi")
def openpi_command(
    source: Annotated[
        Path,
        typer.Argument(help="JAX checkpoint: folder with params and assets.", metavar="SOURCE"),
    ],
    target: Annotated[Path, typer.Argument(help="Folder to write.", metavar="TARGET")],
    action_horizon: Annotated[
        int, typer.Option(help="Actions in a chunk, which the arrays do not tell.", min=1)
    ] = 50,
    dtype: Annotated[
        StoredDtype | None,
        typer.Option(
            help="Precision of the written tensors. Default: that of the arrays.",
            show_default=False,
        ),
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Convert openpi's JAX checkpoint of π0 or π0.5; JAX is not needed."""
    import torch

    from phyai.models.pi05.convert_openpi import convert_openpi

    kinds = {StoredDtype.BF16: torch.bfloat16, StoredDtype.FP32: torch.float32}
    with status_line(f"converting {source}"):
        done = convert_openpi(
            source,
            target,
            action_horizon=action_horizon,
            dtype=None if dtype is None else kinds[dtype],
        )
    summary = {
        "checkpoint": str(target),
        "tensors": done.tensors,
        "parameters": done.parameters,
        "files": [file.name for file in done.files],
        "assets": list(done.assets),
    }
    if json_output:
        print_json(summary)
    else:
        summary |= {"files": len(done.files), "assets": ", ".join(done.assets) or "none"}
        print_pairs(list(summary.items()))
