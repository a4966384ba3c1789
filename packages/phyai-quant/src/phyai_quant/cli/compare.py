"""``phyai-quant compare``: how far are the weights of two checkpoints apart?"""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phyai_quant.cli import output
from phyai_quant.cli.options import Json

if TYPE_CHECKING:
    from phyai_quant.offline.comparison import Comparison

_NAMES_SHOWN = 5


def compare_command(
    first: Annotated[Path, typer.Argument(help="Reference checkpoint.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Checkpoint to judge.", metavar="B")],
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw the heat map of SQNR.", metavar="PNG", show_default=False),
    ] = None,
    min_sqnr: Annotated[
        float | None,
        typer.Option(
            help="Exit 1 when a layer is below this many decibels.",
            metavar="DB",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show the signal-to-quantization-noise ratio of every layer of B against A."""
    from phyai_quant.offline.comparison import compare_checkpoints
    from phyai_quant.offline.files import read_checkpoint
    from phyai_quant.offline.layers import find_layers

    with output.make_progress(of_bytes=False) as progress:
        total = len(find_layers(read_checkpoint(first).tensors))
        task = progress.add_task("comparing", total=total)
        found = compare_checkpoints(
            first, second, on_progress=lambda _: progress.update(task, advance=1)
        )
    if picture is not None:
        from phyai_quant.offline.heatmap import draw_heatmap

        draw_heatmap(
            found.changed or found.layers, picture, title=f"{second.name} against {first.name}"
        )
    below = [
        layer.name
        for layer in found.layers
        if math.isnan(layer.sqnr_db) or (min_sqnr is not None and layer.sqnr_db < min_sqnr)
    ]
    if as_json:
        output.print_json({**asdict(found), "below": below})
    else:
        _print_comparison(found)
        if below:
            output.print_line(f"below the limit: {_shorten(below)}")
    return int(bool(below))


def _print_comparison(found: "Comparison") -> None:
    table = output.make_table(
        "layer",
        "shape",
        "scheme",
        "bits",
        "SQNR dB",
        "rel. L2",
        "max error",
        right=("shape", "bits", "SQNR dB", "rel. L2", "max error"),
    )
    for layer in found.changed:
        table.add_row(
            layer.name,
            output.shape(layer.shape),
            layer.scheme,
            f"{layer.bits:.2f}",
            output.decibels(layer.sqnr_db),
            f"{layer.relative_l2:.2e}",
            f"{layer.max_error:.2e}",
        )
    if found.changed:
        output.print_table(table)
        output.print_line()
    output.print_line(f"{len(found.layers) - len(found.changed)} layers have equal weights")
    output.print_line(f"{found.equal} other tensors are equal, {len(found.differing)} differ")
    for what, names in (
        ("differing tensors", found.differing),
        ("only in the first", found.only_first),
        ("only in the second", found.only_second),
    ):
        if names:
            output.print_line(f"{what}: {_shorten(names)}")
    if found.changed and found.worst is not None:
        worst = found.worst
        output.print_line(f"lowest SQNR: {output.decibels(worst.sqnr_db)} dB in {worst.name}")


def _shorten(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
