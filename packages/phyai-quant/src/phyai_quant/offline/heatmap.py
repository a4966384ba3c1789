"""A picture of SQNR over the layers of a model."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phyai_quant.offline.comparison import LayerDistance
from phyai_quant.scheme import QuantConfigError

_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")
_SMALL, _LABELLED_CELLS = 24, 400
_BRIGHT = 0.6  # viridis above this share of its range needs dark text


def cells_of(layers: Sequence[LayerDistance]) -> dict[tuple[str, str], float]:
    """Returns ``(block, kind)`` to SQNR.

    The block of ``encoder.layers.3.mlp.fc1`` is ``3``, its kind ``encoder.layers.*.mlp.fc1``; a
    layer without a number has the block ``-``.
    """
    cells = {}
    for layer in layers:
        number = _NUMBER.search(layer.name)
        kind = _NUMBER.sub(".*", layer.name, count=1)
        cells[number[1] if number else "-", kind] = layer.sqnr_db
    return cells


def draw_heatmap(layers: Sequence[LayerDistance], file: str | Path, *, title: str) -> None:
    """Draws blocks over kinds of layers, coloured by SQNR; equal weights are left blank.

    Args:
        layers: The layers to show.
        file: Picture to write; the suffix picks the format.
        title: Line above the picture.

    Raises:
        QuantConfigError: matplotlib is missing or does not write this format.
        OSError: The file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise QuantConfigError(
            f"a picture needs matplotlib, which cannot be imported: {error}; install it: "
            'pip install "phyai-quant[cli]"'
        ) from None
    cells = cells_of(layers)
    blocks = sorted({block for block, _ in cells}, key=lambda text: (text != "-", text.zfill(9)))
    kinds = list(dict.fromkeys(kind for _, kind in cells))
    grid = [[_shown(cells.get((block, kind))) for block in blocks] for kind in kinds]
    width = min(2.5 + 0.13 * max(map(len, kinds)) + 0.55 * len(blocks), 40)
    figure = Figure(figsize=(width, min(1.6 + 0.35 * len(kinds), 40)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(grid, aspect="auto", cmap="viridis")
    axes.set_title(title, fontsize=10, parse_math=False)
    axes.set_xlabel("block")
    axes.set_xticks(range(len(blocks)), blocks, fontsize=8)
    axes.set_yticks(range(len(kinds)), kinds, fontsize=8)
    if len(blocks) * len(kinds) <= _LABELLED_CELLS and len(blocks) <= _SMALL:
        shares: Any = image.norm(np.array(grid))
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                if math.isfinite(value):
                    axes.text(
                        column,
                        row,
                        f"{value:.1f}",
                        ha="center",
                        va="center",
                        fontsize=7,
                        color="black" if shares[row][column] > _BRIGHT else "white",
                    )
    figure.colorbar(image, ax=axes, label="SQNR, dB")
    try:
        figure.savefig(file, dpi=120)
    except ValueError as error:
        raise QuantConfigError(f"picture {file}: {error}; use .png, .pdf or .svg") from None


def _shown(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.nan
