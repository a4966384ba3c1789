"""What commands print: JSON documents, tables, lines and progress."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

_PIPE_WIDTH = 100
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def plain(value: object) -> Any:
    """Returns ``value`` in JSON types; numbers that are not finite become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def print_json(document: object) -> None:
    """Writes one indented JSON document to stdout."""
    json.dump(plain(document), sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def print_line(text: str = "") -> None:
    """Writes one line to stdout as it is."""
    sys.stdout.write(text + "\n")


def print_error(text: str) -> None:
    """Writes ``error: ...`` to stderr."""
    tty = sys.stderr.isatty()
    typer.secho("error: ", err=True, nl=False, fg="red" if tty else None, bold=tty)
    typer.echo(text, err=True)


def print_warning(text: str) -> None:
    """Writes ``warning: ...`` to stderr."""
    tty = sys.stderr.isatty()
    typer.secho("warning: ", err=True, nl=False, fg="yellow" if tty else None, bold=tty)
    typer.echo(text, err=True)


def size(count: float) -> str:
    """Returns a number of bytes in words: ``1.5 MiB``."""
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def decibels(value: float) -> str:
    """Returns an SQNR in words; equal weights are ``exact``."""
    return "exact" if value == math.inf else f"{value:.1f}"


def shape(sizes: Sequence[int]) -> str:
    """Returns ``[N, K]`` without a space, for narrow columns: ``384x1536``."""
    return "x".join(map(str, sizes))


def make_table(*columns: str, right: Sequence[str] = ()) -> "Table":
    """Returns an empty table; the columns in ``right`` are aligned to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in columns:
        table.add_column(title, justify="right" if title in right else "left", no_wrap=True)
    return table


def print_table(table: "Table") -> None:
    """Writes a table to stdout. Columns are never cut: a line may be longer than the terminal."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(file=sys.stdout, highlight=False, markup=False)
    roomy = console.options.update(width=10_000)
    needed = Measurement.get(console, roomy, table).maximum
    console.width = max(console.width if console.is_terminal else _PIPE_WIDTH, needed)
    console.print(table)


def make_progress(*, of_bytes: bool) -> "Progress":
    """Returns a progress bar on stderr that stays silent when stderr is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amounts = (DownloadColumn(), TransferSpeedColumn()) if of_bytes else (MofNCompleteColumn(),)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *amounts,
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
