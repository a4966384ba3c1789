"""Draw the diagrams of the docs as SVG: one of the wheels, one of the data flow, one per wheel.

    python scripts/draw_diagrams.py

Boxes stand in a grid; arrows go from box to box. Colours follow the reader's light or dark theme.
"""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 190, 64, 56, 48, 16
STYLE = """
  .box { fill: #e0f2f1; stroke: #00796b; stroke-width: 1.5 }
  .plain { fill: #f5f5f5; stroke: #757575; stroke-width: 1.5 }
  text { font-family: system-ui, sans-serif; font-size: 14px; fill: #212121; text-anchor: middle }
  .small { font-size: 12px; fill: #546e7a }
  path { stroke: #455a64; stroke-width: 1.5; fill: none; marker-end: url(#arrow) }
  marker path { fill: #455a64; stroke: none; marker-end: none }
  @media (prefers-color-scheme: dark) {
    svg { background: #eceff1 }
  }
"""


@dataclass(frozen=True)
class Box:
    """A box of a diagram.

    Attributes:
        column: place in the grid.
        row: place in the grid.
        title: its name.
        note: what it does, in a few words.
        plain: whether it is not of this project.
    """

    column: float
    row: float
    title: str
    note: str = ""
    plain: bool = False

    @property
    def left(self) -> float:
        """Its left edge."""
        return MARGIN + self.column * (WIDTH + GAP_X)

    @property
    def top(self) -> float:
        """Its upper edge."""
        return MARGIN + self.row * (HEIGHT + GAP_Y)


@dataclass
class Diagram:
    """Boxes and the arrows between them.

    Attributes:
        label: what the diagram shows, for readers who do not see it.
        boxes: by name.
        arrows: from, to and what the arrow is called.
    """

    label: str
    boxes: dict[str, Box]
    arrows: list[tuple[str, str, str]] = field(default_factory=list)

    def svg(self) -> str:
        """Return the drawing."""
        right = max(box.left for box in self.boxes.values()) + WIDTH + MARGIN
        bottom = max(box.top for box in self.boxes.values()) + HEIGHT + MARGIN
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right:g} {bottom:g}" '
            f'role="img" aria-label="{escape(self.label)}">',
            f"<style>{STYLE}</style>",
            '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse"><path d="M 0 0 L 10 5 L 0 10 z"/>'
            "</marker></defs>",
        ]
        parts += [self._arrow(*arrow) for arrow in self.arrows]
        parts += [_drawn(box) for box in self.boxes.values()]
        return "\n".join([*parts, "</svg>", ""])

    def _arrow(self, start: str, end: str, name: str) -> str:
        first, last = self.boxes[start], self.boxes[end]
        if abs(first.column - last.column) >= 1 and first.row == last.row:
            forward = first.column < last.column
            x1 = first.left + (WIDTH if forward else 0)
            x2 = last.left + (0 if forward else WIDTH)
            y1 = y2 = first.top + HEIGHT / 2
            text = (x1 + x2) / 2, y1 - 8
        else:
            down = first.row < last.row
            x1, x2 = first.left + WIDTH / 2, last.left + WIDTH / 2
            y1 = first.top + (HEIGHT if down else 0)
            y2 = last.top + (0 if down else HEIGHT)
            text = (x1 + x2) / 2 + 8, (y1 + y2) / 2 + 4
        line = f'<path d="M {x1:g} {y1:g} L {x2:g} {y2:g}"/>'
        if not name:
            return line
        anchor = ' style="text-anchor: start"' if x1 == x2 else ""
        return f'{line}<text class="small" x="{text[0]:g}" y="{text[1]:g}"{anchor}>{name}</text>'


def _drawn(box: Box) -> str:
    kind = "plain" if box.plain else "box"
    middle = box.left + WIDTH / 2
    lines = [
        f'<rect class="{kind}" x="{box.left:g}" y="{box.top:g}" width="{WIDTH}" '
        f'height="{HEIGHT}" rx="8"/>'
    ]
    first = box.top + HEIGHT / 2 + (-4 if box.note else 5)
    lines.append(f'<text x="{middle:g}" y="{first:g}">{escape(box.title)}</text>')
    if box.note:
        lines.append(
            f'<text class="small" x="{middle:g}" y="{first + 20:g}">{escape(box.note)}</text>'
        )
    return "".join(lines)


WHEELS = Diagram(
    "phyai-engine needs phyai-quant, which needs piper-kernels, which needs torch",
    {
        "engine": Box(0, 0, "phyai-engine", "dispatch, models, serving"),
        "quant": Box(1, 0, "phyai-quant", "configs, plans, formats"),
        "kernels": Box(2, 0, "piper-kernels", "operators, tensors"),
        "torch": Box(3, 0, "torch", "triton, torchao as extras", plain=True),
    },
    [("engine", "quant", "needs"), ("quant", "kernels", "needs"), ("kernels", "torch", "needs")],
)
KERNELS = Diagram(
    "A call of F.linear with a quantized weight reaches a backend or the reference",
    {
        "call": Box(0, 0, "F.linear(x, weight)", "or the operator itself", plain=True),
        "handler": Box(1, 0, "tensor subclass", "packed codes and scales"),
        "op": Box(2, 0, "op.py", "checks of metadata only"),
        "target": Box(3, 0, "target lookup", "what fits this device"),
        "backend": Box(3, 1, "backend", "Triton, for one target"),
        "reference": Box(2, 1, "reference", "plain PyTorch, everywhere"),
    },
    [
        ("call", "handler", ""),
        ("handler", "op", ""),
        ("op", "target", ""),
        ("target", "backend", "usable"),
        ("target", "reference", ""),
    ],
)
QUANT = Diagram(
    "A config becomes a plan, a scheme for each layer, and a weight in memory",
    {
        "config": Box(0, 0, "config", "of a checkpoint or policy", plain=True),
        "plan": Box(1, 0, "QuantPlan", "ordered rules"),
        "scheme": Box(2, 0, "QuantScheme", "of one layer"),
        "spec": Box(3, 0, "WeightSpec", "what memory holds"),
        "weight": Box(3, 1, "weight", "loaded and processed"),
        "tensors": Box(2, 1, "tensors", "of the checkpoint", plain=True),
    },
    [
        ("config", "plan", "import"),
        ("plan", "scheme", "resolve"),
        ("scheme", "spec", "lower"),
        ("spec", "weight", "allocate"),
        ("tensors", "weight", "load"),
    ],
)
ENGINE = Diagram(
    "A layer's call site asks the selector, which checks predicates and the policy",
    {
        "layer": Box(0, 0, "layer", "owns a call site"),
        "facts": Box(1, 0, "facts", "shapes, dtypes, weight"),
        "selector": Box(2, 0, "selector", "prepares and remembers"),
        "kernel": Box(3, 0, "kernel", "runs, or is captured"),
        "catalog": Box(1, 1, "catalog", "rows and predicates"),
        "policy": Box(2, 1, "policy", "rules and overrides"),
        "explain": Box(3, 1, "explain", "the same predicates"),
    },
    [
        ("layer", "facts", ""),
        ("facts", "selector", ""),
        ("selector", "kernel", ""),
        ("catalog", "selector", ""),
        ("policy", "selector", ""),
        ("selector", "explain", ""),
    ],
)
FLOW = Diagram(
    "Images and state from a robot become actions; weights from a file become products",
    {
        "robot": Box(0, 0, "robot", "images, state, task", plain=True),
        "server": Box(1, 0, "policy server", "WebSocket, batching"),
        "processing": Box(2, 0, "processing", "resize, normalise, tokens"),
        "model": Box(3, 0, "model", "CUDA graphs"),
        "actions": Box(4, 0, "actions", "in the robot's units", plain=True),
        "file": Box(0, 1, "checkpoint", "safetensors, configs", plain=True),
        "plan": Box(1, 1, "plan", "which layer, what format"),
        "weights": Box(2, 1, "weights", "quantized at load"),
        "selector": Box(3, 1, "dispatcher", "under a policy"),
        "kernels": Box(4, 1, "kernels", "ours and others'"),
    },
    [
        ("robot", "server", ""),
        ("server", "processing", ""),
        ("processing", "model", ""),
        ("model", "actions", ""),
        ("file", "plan", ""),
        ("plan", "weights", ""),
        ("weights", "selector", ""),
        ("selector", "kernels", ""),
        ("model", "selector", "calls"),
    ],
)
DIAGRAMS = {
    "wheels": WHEELS,
    "piper-kernels": KERNELS,
    "phyai-quant": QUANT,
    "phyai-engine": ENGINE,
    "data-flow": FLOW,
}


def main() -> None:
    """Write all diagrams."""
    for name, diagram in DIAGRAMS.items():
        (IMAGES / f"{name}.svg").write_text(diagram.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
