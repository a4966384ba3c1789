"""The look of the pictures on performance, and their text as SVG."""

import io
import re
import textwrap
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

OURS, BASELINE = "#0b62c4", "#6b7280"
INK, GRID = "#1f2937", "#d8dee6"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "piper",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
}


def environment(place: Mapping[str, Any]) -> str:
    """Return device, versions and commit of a result."""
    names = ("python", "torch", "triton", "torchao")
    versions = [f"{name} {place['versions'][name]}" for name in names if name in place["versions"]]
    return f"{place['device']}, {', '.join(versions)}, commit {place['commit']}."


def caption(figure: Figure, text: str) -> None:
    """Write text under a figure, broken to its width."""
    characters = int(figure.get_figwidth() * 15.5)
    lines = "\n".join(textwrap.wrap(text, characters))
    figure.text(0.012, 0.012, lines, fontsize=8, va="bottom", color="#4b5563", linespacing=1.4)


def grid(axes: Axes, *, axis: str = "both") -> None:
    """Draw light grid lines and no frame on the right and top."""
    axes.grid(visible=True, axis=axis, color=GRID, linewidth=0.8)  # pyright: ignore[reportArgumentType]
    axes.spines[["top", "right"]].set_visible(False)


def svg(figure: Figure) -> str:
    """Return a figure as SVG that depends on nothing but what it shows."""
    written = io.BytesIO()
    with mpl.rc_context(STYLE):
        FigureCanvasSVG(figure).print_svg(written, metadata={"Date": None, "Creator": None})
    text = written.getvalue().decode()
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def styled(width: float, height: float) -> Figure:
    """Return an empty figure; sizes in inches."""
    return Figure(figsize=(width, height))
