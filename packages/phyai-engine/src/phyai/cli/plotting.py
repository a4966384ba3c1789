"""Pictures of action chunks."""

import math
import textwrap
from pathlib import Path

import numpy as np

from phyai.cli.errors import CliError

COLUMNS = 3


def require_matplotlib() -> None:
    """Fail early, before a model is loaded, when no picture can be drawn.

    Raises:
        CliError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise CliError(
            f"a picture needs matplotlib, which cannot be imported: {error}",
            'pip install "phyai-engine[plot]"',
        ) from None


def plot_actions(actions: np.ndarray, path: Path, *, title: str) -> None:
    """Draw every action dimension over the steps of a chunk, one panel each.

    Args:
        actions: float array [steps, action_dim], robot units.
        path: Picture file; the suffix picks the format.
        title: Line above the panels.

    Raises:
        CliError: matplotlib is missing or does not write this format.
        OSError: The file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    steps, dims = actions.shape
    columns = min(COLUMNS, dims)
    rows = math.ceil(dims / columns)
    figure = Figure(figsize=(4 * columns, 2.2 * rows + 0.6), layout="constrained")
    figure.suptitle(textwrap.fill(title, 36 * columns), fontsize=11, parse_math=False)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True)
    marker = "o" if steps == 1 else None
    for dim, panel in enumerate(panels.flat):
        if dim >= dims:
            panel.set_visible(False)
            continue
        panel.plot(np.arange(steps), actions[:, dim], marker=marker, linewidth=1.4)
        panel.set_title(f"action {dim}", fontsize=9)
        panel.grid(alpha=0.3)
        if dim + columns >= dims:
            panel.set_xlabel("step")
            panel.tick_params(labelbottom=True)
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise picture_error(path, error) from None


def picture_error(path: Path, error: ValueError) -> CliError:
    """Return the error for a picture that matplotlib refuses to write."""
    return CliError(f"picture {path}: {error}", "use the suffix .png, .pdf or .svg")
