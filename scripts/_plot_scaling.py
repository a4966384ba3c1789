"""The picture of several GPUs: how much faster they are, and what each holds."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from _plot_style import STYLE, caption, environment, grid, styled
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

MODELS = {"cosmos3_nano": "Nano", "cosmos3_super": "Super"}
SHARES = {"branches": "branches", "layers": "layers"}
COLORS = {
    ("cosmos3_nano", "branches"): "#0b62c4",
    ("cosmos3_nano", "layers"): "#7db4ef",
    ("cosmos3_super", "branches"): "#d97706",
    ("cosmos3_super", "layers"): "#f3b765",
}
REPLICAS = "#0f9d7a"


@dataclass(frozen=True)
class Series:
    """A line of the picture.

    Attributes:
        label: what stands at its end.
        color: of line and label.
        points: numbers of GPUs and values.
    """

    label: str
    color: str
    points: list[tuple[int, float]]


def grid_key(devices: int, share: str) -> str:
    """Return the name under which results have a way to share a number of devices."""
    if devices == 2:
        return share
    branches = 2 if share == "branches" else 1
    return f"cfg {branches} x tp {devices // branches}"


def speedups(documents: Sequence[dict[str, Any]]) -> list[Series]:
    """Return how many times faster than one GPU all are, by model and way to share."""
    found = [
        *_shared(documents, lambda entry: entry.get("speedup"), lambda one: 1.0 if one else None)
    ]
    points = [
        (document["devices"], document["pi05"]["speedup"])
        for document in documents
        if "speedup" in document.get("pi05", {})
    ]
    if points:
        found.insert(0, Series("π0.5, replicas", REPLICAS, [(1, 1.0), *points]))
    return found


def memory(documents: Sequence[dict[str, Any]]) -> list[Series]:
    """Return the most GB that a rank of Cosmos3 has had in use, by model and way to share."""

    def most(entry: dict[str, Any]) -> float | None:
        return max(entry["most_bytes"]) / 1e9 if "most_bytes" in entry else None

    return [*_shared(documents, most, most)]


def _shared(
    documents: Sequence[dict[str, Any]],
    value: Callable[[dict[str, Any]], float | None],
    alone: Callable[[dict[str, Any]], float | None],
) -> Iterator[Series]:
    for model, name in MODELS.items():
        parts = [(document["devices"], document.get(model, {})) for document in documents]
        ones = [
            alone(part["one_device"]) for _, part in parts if "ms" in part.get("one_device", {})
        ]
        for share, how in SHARES.items():
            measured = [
                (devices, value(part.get(grid_key(devices, share), {}))) for devices, part in parts
            ]
            points = [(devices, found) for devices, found in measured if found is not None]
            if points:
                first = [(1, one) for one in ones[:1] if one is not None]
                yield Series(f"{name}, {how}", COLORS[model, share], [*first, *points])


def scaling(documents: Sequence[dict[str, Any]]) -> Figure:
    """Return how much faster several GPUs are than one, and what a rank holds.

    Args:
        documents: what ``gpu_check_multi.py`` has stored, by number of GPUs.
    """
    with mpl.rc_context(STYLE):
        figure = styled(9.5, 4.6)
        left, right = (figure.add_axes((x, 0.29, 0.26, 0.61)) for x in (0.07, 0.57))
        ticks = [1, *(document["devices"] for document in documents)]
        left.plot(ticks, ticks, color="#9ca3af", linestyle="--", linewidth=1)
        _draw(left, speedups(documents), ticks, "{:.2f} ×", "times faster than one GPU")
        _draw(right, memory(documents), ticks, "{:.0f} GB", "GB in use on a rank, at most")
        left.set_title("Chunks of actions", loc="left")
        right.set_title("Memory of Cosmos3", loc="left")
        places = [
            part["environment"]
            for document in documents
            for part in document.values()
            if isinstance(part, dict) and "environment" in part
        ]
        caption(
            figure,
            "Cosmos3: latency of one request whose guidance branches or layers the GPUs share, "
            "beside one GPU in the same run. π0.5: chunks a second of a replica on every GPU, "
            "beside one replica. Dashed: as many times faster as there are GPUs. "
            + " ".join(dict.fromkeys(environment(place) for place in places)),
        )
    return figure


def _draw(axes: Axes, series: Sequence[Series], ticks: list[int], text: str, title: str) -> None:
    for one in series:
        xs, ys = zip(*one.points, strict=True)
        axes.plot(xs, ys, marker="o", markersize=5, color=one.color)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.set_xticks(ticks)
    axes.set_xlim(0.8, max(ticks) + 0.2)
    axes.set_xlabel("GPUs")
    axes.set_ylabel(title)
    grid(axes)
    most = axes.get_ylim()[1]
    last = sorted(series, key=lambda one: one.points[-1][1])
    for one, height in zip(last, _apart([one.points[-1][1] / most for one in last]), strict=True):
        label = f"{one.label}: {text.format(one.points[-1][1])}"
        place = {"xycoords": "axes fraction", "va": "center", "fontsize": 8.5}
        axes.annotate(label, (1.03, height), color=one.color, **place)


def _apart(heights: Sequence[float], least: float = 0.075) -> list[float]:
    """Return ascending heights moved apart, none above 1 but where there is no room."""
    found: list[float] = []
    for height in heights:
        found.append(max([height, *(below + least for below in found[-1:])]))
    above = 1.0 + least
    for place in reversed(range(len(found))):
        found[place] = above = min(found[place], above - least)
    return found
