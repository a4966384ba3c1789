"""The picture of the π0.5 benchmark: stages, floors and what others publish."""

from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from _plot_style import STYLE, caption, environment, grid, styled
from matplotlib.figure import Figure

STAGES = {"vision": "#0b62c4", "prefix": "#0f9d7a", "denoise": "#d97706"}
OTHERS = "#9ca3af"


@dataclass(frozen=True)
class Published:
    """A latency that others publish.

    Attributes:
        source: who, on which device.
        setting: views, tokens of the prefix, how it runs.
        total: milliseconds for a chunk.
        parts: milliseconds of each of `STAGES`, where they are stated.
    """

    source: str
    setting: str
    total: float
    parts: tuple[float, ...] = ()


PUBLISHED = (
    Published("PhyAI blog, Hopper", "3 views, 784 tokens, CUDA graphs", 22.6, (3.5, 6.1, 12.9)),
    Published("Realtime-VLA, RTX 5090", "3 views, no prompt, chunk 63", 34.2),
    Published("Realtime-VLA, RTX 5090", "2 views, no prompt, chunk 63", 26.6),
    Published("SGLang, H200", "3 views, 968 tokens, CUDA graphs", 43.07),
    Published("SGLang, H100", "3 views, 968 tokens", 52.4),
    Published("OpenPI in JAX, H100, by SGLang", "batch 1", 53.0),
)
"""π0.5 in bf16, ten steps, one request, as their authors state it."""


def pi05_stages(document: dict[str, Any]) -> Figure:
    """Return medians of one request's stages above their floors, and published latencies below."""
    bars = [
        (name, result)
        for name, found in document["policies"].items()
        for result in found.get("results", [])
        if result["setting"]["batch"] == 1
    ]
    with mpl.rc_context(STYLE):
        figure = styled(9.5, 1.9 + 0.47 * (len(bars) + len(PUBLISHED)))
        height = figure.get_figheight()
        axes = figure.add_axes((0.325, 1.35 / height, 0.65, 1 - 1.75 / height))
        labels = []
        for place, (name, result) in enumerate(bars):
            start = floor = 0.0
            for stage, color in STAGES.items():
                spent, least = result["ms"][stage]["p50"], result["floor_ms"][stage]
                label = stage if place == 0 else None
                axes.barh(place, spent, left=start, height=0.5, color=color, label=label)
                axes.barh(place + 0.36, least, left=floor, height=0.14, color=color, alpha=0.45)
                start, floor = start + spent, floor + least
            total = result["ms"]["chunk"]["p50"]
            axes.text(start + 0.5, place, f"{total:.1f} ms", va="center", fontsize=9)
            axes.text(floor + 0.3, place + 0.37, f"floor {floor:.1f}", va="center", fontsize=7)
            labels.append(f"{name}\n{result['setting']['name']}")
        for place, one in enumerate(PUBLISHED, start=len(bars)):
            start = 0.0
            colors = STAGES.values() if one.parts else [OTHERS]
            for part, color in zip(one.parts or (one.total,), colors, strict=True):
                alpha = 1.0 if color == OTHERS else 0.55
                axes.barh(place, part, left=start, height=0.5, color=color, alpha=alpha)
                start += part
            axes.text(start + 0.5, place, f"{one.total:.1f} ms", va="center", fontsize=9)
            labels.append(f"{one.source}\n{one.setting}")
        axes.axhline(len(bars) - 0.42, color="#374151", linewidth=0.8)
        axes.set_yticks(range(len(labels)), labels, fontsize=8.5)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(labels) - 0.45, -0.6)
        axes.set_xlim(0, 60)
        axes.set_xlabel("milliseconds for a chunk of actions")
        axes.set_title("π0.5, one request, ten steps", loc="left")
        axes.legend(loc="upper right", fontsize=9)
        grid(axes, axis="x")
        place = document["environment"]
        caption(
            figure,
            "Above the line: medians of this benchmark; thin bars are what the work takes at "
            "790 TFLOP/s and 4.3 TB/s in bf16. Below: what the named authors publish, on their own "
            f"devices and settings, not measured here; grey where stages are not stated. "
            f"{environment(place)}",
        )
    return figure
