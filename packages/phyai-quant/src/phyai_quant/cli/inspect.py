"""``phyai-quant inspect``: which layer of a checkpoint is quantized to what."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phyai_quant.cli import output
from phyai_quant.cli.options import CheckpointDir, Json

if TYPE_CHECKING:
    from phyai_quant.offline.report import LayerRow

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def inspect_command(
    directory: CheckpointDir,
    policy: Annotated[
        Path | None,
        typer.Option(
            help="Show what quantizing with this policy would give.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    sm: Annotated[
        int | None,
        typer.Option(
            help="NVIDIA SM version whose weight formats are shown, such as 90. "
            "Default: the portable ones.",
            show_default=False,
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="One row for layers that differ in numbers only.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show rule, scheme, weight format and bytes of every layer.

    "before" is the size in the precision of the layer's source: the dense weight with --policy, a
    16-bit weight for layers that are quantized on disk. Reads no weights.
    """
    from phyai_quant.offline.report import inspect_checkpoint

    plan = None
    if policy is not None:
        from phyai_quant.offline.policy_file import read_policy

        plan = read_policy(policy)
    rows, other = inspect_checkpoint(directory, plan, sm)
    before, after = sum(row.before for row in rows), sum(row.after for row in rows)
    if as_json:
        output.print_json(
            {
                "layers": [row.as_dict() for row in rows],
                "bytes": {"before": before + other, "after": after + other, "other": other},
            }
        )
        return
    _print_report(rows, other, merge=merge)


def _print_report(rows: "Sequence[LayerRow]", other: int, *, merge: bool) -> None:
    before, after = sum(row.before for row in rows), sum(row.after for row in rows)
    table = output.make_table(
        "layer",
        "shape",
        "rule",
        "scheme",
        "format",
        "before",
        "after",
        right=("shape", "before", "after"),
    )
    for cells in _table_rows([row.as_dict() for row in rows], merge=merge):
        table.add_row(*cells)
    output.print_table(table)
    output.print_line()
    quantized = sum(row.scheme is not None for row in rows)
    output.print_line(f"{quantized} of {len(rows)} layers with a weight matrix are quantized")
    output.print_line(
        f"{output.size(before + other)} before, {output.size(after + other)} after, "
        f"{output.size(other)} of them other tensors"
    )


def _table_rows(rows: list[dict[str, Any]], *, merge: bool) -> list[tuple[str, ...]]:
    merged: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        name = _NUMBER.sub("*", row["name"]) if merge else row["name"]
        rule = _NUMBER.sub("*", row["rule"]) if merge else row["rule"]
        key = (name, output.shape(row["shape"]), rule, row["summary"], row["format"])
        sizes = merged.setdefault(key, [0, 0, 0])
        sizes[0] += row["before"]
        sizes[1] += row["after"]
        sizes[2] += 1
    return [
        (
            f"{key[0]} ({count})" if count > 1 else key[0],
            *key[1:],
            output.size(before),
            output.size(after),
        )
        for key, (before, after, count) in merged.items()
    ]
