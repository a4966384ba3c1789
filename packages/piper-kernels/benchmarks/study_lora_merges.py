"""What 100 seeded stochastic LoRA merges keep of an update, against rounding to nearest.

A quantized weight sits on its codes, so an update smaller than half a step is lost when it is
rounded to nearest. Stochastic rounding keeps it on average. Per format and size of the update:

* kept: the part of the update that arrived, ``<W' - W, D> / <D, D>``; 1 is unbiased.
* error of the mean: ``|mean(W') - (W + D)| / |D|`` over a growing number of merges, which falls
  as ``1 / sqrt(n)`` when only noise is left.

    python study_lora_merges.py
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from _report import REPOSITORY, RESULTS, commit, replace_table, say, table, versions, write_json
from torch import Tensor

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

RESULT = RESULTS / "cpu" / "lora_merges.json"
PAGE = REPOSITORY / "docs" / "weight-quality.md"
PLOT = REPOSITORY / "docs" / "images" / "lora_merge_bias.png"
ROWS, FEATURES, RANK = 128, 256, 8
SIZES = (0.05, 0.1, 0.2, 0.4, 0.8)
SHOWN_SIZE = 0.1


def quantize(name: str, dense: Tensor) -> Any:
    """Return ``dense`` as a weight of the named format."""
    if name == "ConvRot INT8 g64":
        return ConvRotInt8Tensor.from_hp(dense, group_size=64)
    if name == "NVFP4":
        return PiperNVFP4Tensor.from_hp(dense, compute_per_tensor_scale=True)
    return ConvRotNVFP4Tensor.from_hp(dense, group_size=64, compute_per_tensor_scale=True)


FORMATS = ("ConvRot INT8 g64", "NVFP4", "ConvRot NVFP4 g64")


def merged(weight: Any, lora: tuple[Tensor, Tensor], seed: int | None) -> Tensor:
    """Return the dense FP32 weight after one merge into a copy."""
    changed = copy.deepcopy(weight)
    changed.addmm_(*lora, rounding_seed=seed)
    return changed.dequantize().double()


def study_size(name: str, size: float, merges: int) -> dict:
    """Merge one LoRA update, ``size`` effective steps large, with every seed."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(ROWS, FEATURES, generator=generator)
    weight = quantize(name, dense)
    base = weight.dequantize().double()
    # A uniform error of one step has the RMS step / sqrt(12).
    step = float((dense.double() - base).square().mean().sqrt() * 12**0.5)
    left = torch.randn(ROWS, RANK, generator=generator)
    right = torch.randn(RANK, FEATURES, generator=generator)
    right *= size * step / float((left @ right).square().mean().sqrt())
    update = left.double() @ right.double()

    def kept(result: Tensor) -> float:
        return float(((result - base) * update).sum() / update.square().sum())

    def error(result: Tensor) -> float:
        return float((result - base - update).norm() / update.norm())

    total = torch.zeros_like(base)
    parts, errors = [], []
    for seed in range(merges):
        result = merged(weight, (left, right), seed)
        total += result
        parts.append(kept(result))
        errors.append(error(total / (seed + 1)))
    nearest = merged(weight, (left, right), None)
    spread = torch.tensor(parts)
    return {
        "size": size,
        "kept_nearest": kept(nearest),
        "kept_mean": float(spread.mean()),
        "kept_standard_error": float(spread.std() / merges**0.5),
        "error_nearest": error(nearest),
        "error_of_mean": errors,
    }


def study(merges: int = 100) -> dict:
    """Run every format and size and return the JSON-able result."""
    return {
        "shape": [ROWS, FEATURES],
        "rank": RANK,
        "merges": merges,
        "device": "cpu",
        "versions": versions(),
        "commit": commit(),
        "formats": {name: [study_size(name, size, merges) for size in SIZES] for name in FORMATS},
    }


def merges_table(result: dict) -> str:
    """Return the table of what is kept by format and size."""
    rows = [
        [
            name,
            f"{row['size']:.2f}",
            f"{row['kept_nearest']:.3f}",
            f"{row['kept_mean']:.4f} ± {row['kept_standard_error']:.4f}",
            f"{row['error_nearest']:.2f}",
            f"{row['error_of_mean'][-1]:.2f}",
        ]
        for name, sizes in result["formats"].items()
        for row in sizes
    ]
    header = ["format", "update RMS, in steps", "kept, nearest", "kept, stochastic mean"]
    return table([*header, "error, nearest", f"error of the mean of {result['merges']}"], rows)


def plot(result: dict, path: Path) -> None:
    """Draw what is kept by update size, and the error of the mean by number of merges."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    count = range(1, result["merges"] + 1)
    for index, (name, sizes) in enumerate(result["formats"].items()):
        colour = f"C{index}"
        xs = [row["size"] for row in sizes]
        left.errorbar(
            xs,
            [row["kept_mean"] for row in sizes],
            yerr=[3 * row["kept_standard_error"] for row in sizes],
            color=colour,
            marker="o",
            capsize=3,
            label=f"{name}, stochastic",
        )
        nearest = [row["kept_nearest"] for row in sizes]
        left.plot(xs, nearest, color=colour, marker="x", linestyle="--", label=f"{name}, nearest")
        shown = next(row for row in sizes if row["size"] == SHOWN_SIZE)
        right.plot(count, shown["error_of_mean"], color=colour)
        right.axhline(shown["error_nearest"], color=colour, linestyle="--")
    first = next(iter(result["formats"].values()))[SIZES.index(SHOWN_SIZE)]["error_of_mean"][0]
    right.plot(count, [first / n**0.5 for n in count], color="grey", linestyle=":", label="1/√n")
    left.axhline(1, color="grey", linewidth=0.8)
    left.set(
        xscale="log",
        xlabel="RMS of the update, in quantization steps",
        ylabel="part of the update that is kept",
        title="Mean of 100 merges (bars: 3 standard errors)",
        xticks=SIZES,
        xticklabels=[str(size) for size in SIZES],
    )
    left.minorticks_off()
    right.set(
        xscale="log",
        yscale="log",
        xlabel="merges averaged",
        ylabel="error of the mean / size of the update",
        title=f"Update of {SHOWN_SIZE} steps (dashed: nearest)",
    )
    right.set_yticks([0.2, 0.3, 0.5, 1, 2, 3], labels=["0.2", "0.3", "0.5", "1", "2", "3"])
    right.set_xticks([1, 3, 10, 30, 100], labels=["1", "3", "10", "30", "100"])
    right.minorticks_off()
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def render(page: str, result: dict) -> str:
    """Return the page with the table of the merges filled in."""
    return replace_table(page, "lora merges", merges_table(result))


def main() -> None:
    """Run the study, store its result, draw the plot and fill the table of the page."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    result = study()
    write_json(RESULT, result)
    plot(result, PLOT)
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")
    say(merges_table(result))


if __name__ == "__main__":
    main()
