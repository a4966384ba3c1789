"""What commands print: JSON documents, tables, lines and progress."""

import contextlib
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from rich.progress import Progress
    from rich.table import Table

PIPE_WIDTH = 100


def plain(value: object) -> Any:
    """Return `value` in JSON types.

    Arrays become lists, sets sorted lists, paths and unknown objects strings. A number that is not
    finite becomes None, because JSON has no word for it.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain(item) for item in value]
    array = getattr(value, "tolist", None)
    return str(value) if array is None else plain(array())


def print_json(document: object) -> None:
    """Write `document` to stdout as one indented JSON document."""
    json.dump(plain(document), sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what libraries print meanwhile to stderr, so that stdout holds only the result."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def print_line(text: str = "") -> None:
    """Write one line to stdout as it is, without wrapping or markup."""
    sys.stdout.write(text + "\n")


def one_line(text: str) -> str:
    """Return `text` with line breaks written as backslash n."""
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def print_pairs(pairs: Sequence[tuple[str, object]]) -> None:
    """Write aligned ``name  value`` lines to stdout."""
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        print_line(f"{name:<{width}}  {value}")


def make_table(*columns: str, numbers: bool = False) -> "Table":
    """Return an empty table with the house style.

    Args:
        columns: Column titles.
        numbers: True aligns every column but the first to the right.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, title in enumerate(columns):
        right = numbers and index > 0
        table.add_column(title, justify="right" if right else "left", no_wrap=numbers)
    return table


def print_table(table: "Table") -> None:
    """Write `table` to stdout. Columns are never cut: a line may be longer than the terminal."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(file=sys.stdout, highlight=False, markup=False)
    width = console.width if console.is_terminal else PIPE_WIDTH
    roomy = console.options.update(width=10_000)
    needed = Measurement.get(console, roomy, table)
    console.width = max(width, needed.minimum)
    console.print(table)


def print_actions(actions: "np.ndarray", rows: int) -> None:
    """Print the first rows of a chunk [actions, columns] as a table."""
    table = make_table("step", *(f"a{column}" for column in range(actions.shape[1])), numbers=True)
    for step, row in enumerate(actions[:rows]):
        table.add_row(str(step), *(f"{value:.4f}" for value in row))
    print_table(table)
    if len(actions) > rows:
        print_line(f"... {len(actions) - rows} more steps (--rows {len(actions)} shows all)")


def make_progress() -> "Progress":
    """Return a progress bar on stderr that stays silent when stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        disable=not sys.stderr.isatty(),
        transient=True,
    )


@contextlib.contextmanager
def status_line(text: str) -> Iterator[None]:
    """Show `text` with a spinner on stderr while the body runs; silent when no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(file=sys.stderr).status(text):
        yield


def display_path(path: Path) -> str:
    """Return `path` relative to the current folder where that is shorter."""
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)


def quiet_libraries() -> None:
    """Keep notices that libraries print while they are imported off the terminal.

    TorchAO's source makes Python print a SyntaxWarning when it is first compiled, and its
    registrations make torch log one about enumerations; neither is about what the user does.
    """
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
