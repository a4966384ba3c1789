"""Draw the stored results of the benchmarks as SVG for the pages on performance.

    python scripts/plot_results.py [--check] [--out FOLDER]

Reads ``packages/*/benchmarks/results/nvidia-h200/`` and writes ``docs/images/performance/``. With
``--check`` it writes nothing and fails where a stored picture differs, up to rounding.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _plot_kernels import attention_rates, linear_roofline, sparse_rates
from _plot_pi05 import pi05_stages
from _plot_style import svg
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "images" / "performance"
KERNELS = "packages/piper-kernels/benchmarks/results/nvidia-h200"
ENGINE = "packages/phyai-engine/benchmarks/results/nvidia-h200"

FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], Figure]]] = {
    "linear-roofline": (f"{KERNELS}/linear.json", linear_roofline),
    "attention-rate": (f"{KERNELS}/attention.json", attention_rates),
    "sparse-attention-rate": (f"{KERNELS}/sparse_attention.json", sparse_rates),
    "pi05-stages": (f"{ENGINE}/pi05.json", pi05_stages),
}
"""By the name of a picture, the results that it shows and what draws them."""

_NUMBER = re.compile(r"-?\d+\.\d+")


def draw(name: str, root: Path = ROOT) -> str:
    """Return the SVG of one picture."""
    source, figure = FIGURES[name]
    return svg(figure(json.loads((root / source).read_text(encoding="utf-8"))))


def same(first: str, second: str) -> bool:
    """Return whether two pictures are the same up to a hundredth of a point."""
    if _NUMBER.sub("#", first) != _NUMBER.sub("#", second):
        return False
    pairs = zip(_NUMBER.findall(first), _NUMBER.findall(second), strict=True)
    return all(abs(float(a) - float(b)) <= 0.01 for a, b in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check every picture; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    stale = []
    for name in FIGURES:
        path, drawn = options.out / f"{name}.svg", draw(name)
        if options.check:
            if not path.exists() or not same(path.read_text(encoding="utf-8"), drawn):
                stale.append(str(path))
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(drawn, encoding="utf-8")
    if stale:
        print(f"not what the results say, run scripts/plot_results.py: {', '.join(stale)}")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
