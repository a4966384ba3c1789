"""Pictures of the benchmarks of linears and attention."""

from itertools import groupby
from typing import Any

import matplotlib as mpl
from _plot_style import BASELINE, OURS, STYLE, caption, environment, grid, styled
from matplotlib.figure import Figure

# By provider: label, color, marker, bits that a stored weight takes with its scales.
LINEARS = {
    "piper_int8": ("Piper ConvRot INT8", OURS, "o", 8),
    "piper_nvfp4": ("Piper NVFP4, bf16 inputs", "#0f9d7a", "o", 4.5),
    "piper_convrot_nvfp4": ("Piper ConvRot NVFP4, bf16 inputs", "#0f9d7a", "D", 4.5),
    "piper_nvfp4_w4a4": ("Piper NVFP4, 4-bit inputs", "#7c3aed", "o", 4.5),
    "piper_convrot_nvfp4_w4a4": ("Piper ConvRot NVFP4, 4-bit inputs", "#7c3aed", "D", 4.5),
    "bf16": ("bf16, cuBLAS", BASELINE, "s", 16),
    "int_mm": ("INT8, torch._int_mm", "#d97706", "^", 8),
    "fp8_rowwise": ("FP8 rows, torch._scaled_mm", "#dc2626", "v", 8),
    "torchao_int8": ("INT8, torchao", "#d97706", "x", 8),
    "humming_int8": ("INT8, Humming", "#a16207", "P", 8),
    "humming_w4a16": ("INT4, Humming", "#a16207", "X", 4.125),
    "humming_nvfp4": ("NVFP4, Humming", "#a16207", "d", 4.5),
}
ATTENTION = {
    "piper": ("Piper attention", OURS, "o"),
    "sage": ("SageAttention2++ in Piper", "#0f9d7a", "D"),
    "cudnn": ("cuDNN, bf16", BASELINE, "s"),
    "flash": ("Flash SDPA, bf16", "#d97706", "^"),
    "flashinfer_fa3": ("FlashInfer FA3, bf16", "#dc2626", "v"),
    "sageattention": ("SageAttention", "#7c3aed", "P"),
}
INK_LINE = "#374151"
SPARSE = {
    "sparse_mean": ("Sparse Piper, mean", OURS, "o"),
    "sparse_minmax": ("Sparse Piper, minmax", "#0f9d7a", "D"),
}


def intensity(row: dict[str, Any]) -> float:
    """Return operations over least traffic: bf16 input and output, and the stored weight."""
    m, n, k = row["m"], row["n"], row["k"]
    weight = n * k * LINEARS[row["provider"]][3] / 8
    return 2 * m * n * k / (2 * m * (n + k) + weight)


def ceilings(rows: list[dict[str, Any]]) -> tuple[float, dict[str, float]]:
    """Return the copy rate in TB/s and the fastest products in TOP/s, as the run measured them."""
    copies = [r["preparation_gbps"] / r["of_copy"] for r in rows if r.get("of_copy")]

    def fastest(providers: tuple[str, ...], keys: tuple[str, ...] = ("product_tops",)) -> float:
        used = [row for row in rows if row["provider"] in providers]
        return max(row[key] for row in used for key in keys if row.get(key))

    return max(copies) / 1000, {
        "INT8 product": fastest(("piper_int8", "int_mm")),
        "FP8 product": fastest(("fp8_rowwise",)),
        # A linear in bf16 is a product alone, unless an activation stands in front of it.
        "bf16 product": fastest(("bf16",), ("product_tops", "tops")),
    }


def linear_roofline(result: dict[str, Any]) -> Figure:
    """Return the rate of whole linears over their arithmetic intensity."""
    rows = [row for row in result["rows"] if row.get("tops")]
    copy, products = ceilings(rows)
    with mpl.rc_context(STYLE):
        figure = styled(9.5, 6.6)
        axes = figure.add_axes((0.075, 0.215, 0.905, 0.725))
        axes.set_xscale("log")
        axes.set_yscale("log")
        top = max(products.values())
        left, right = 0.7, 3e4
        axes.plot([left, top / copy], [left * copy, top], color=INK_LINE, linewidth=1.4)
        axes.text(1.5, 1.5 * copy * 1.25, f"copy, {copy:.2f} TB/s", rotation=42, fontsize=9)
        axes.set_xlim(left, right)
        axes.set_ylim(2, 3200)
        for index, (name, rate) in enumerate(products.items()):
            axes.plot([rate / copy, right], [rate, rate], color=INK_LINE, linewidth=1.1)
            above = index != 1
            axes.text(
                right * 0.97,
                rate * (1.05 if above else 0.94),
                f"{name}, {rate:.0f} TOP/s",
                fontsize=9,
                ha="right",
                va="bottom" if above else "top",
            )
        for provider, (label, color, marker, _) in LINEARS.items():
            mine = [row for row in rows if row["provider"] == provider]
            if mine:
                axes.plot(
                    [intensity(row) for row in mine],
                    [row["tops"] for row in mine],
                    linestyle="none",
                    marker=marker,
                    markersize=6.5,
                    color=color,
                    markeredgecolor="white" if marker != "x" else color,
                    markeredgewidth=0.6,
                    label=label,
                )
        axes.set_xlabel("operations per byte of bf16 input, stored weight and bf16 output")
        axes.set_ylabel("TOP/s of the whole linear")
        axes.set_title("Quantized linears under the measured ceilings", loc="left")
        axes.legend(loc="lower right", fontsize=8.5, ncols=2)
        grid(axes)
        caption(
            figure,
            "Time from the bf16 input to the bf16 output, preparation included. The ceilings are "
            "the fastest copy and the fastest products of the same run: products alone, without "
            f"preparation. {environment(result)}",
        )
    return figure


def attention_rates(result: dict[str, Any]) -> Figure:
    """Return the rate of dense attention by length, a panel for each kind."""
    rows = [r for r in result["rows"] if r.get("tops") and "/" not in r["case"].split(" S")[0]]

    def kind(row: dict[str, Any]) -> tuple[int, bool]:
        return -row["head_dim"], row["causal"]

    kinds = {key: [*found] for key, found in groupby(sorted(rows, key=kind), key=kind)}
    lengths = sorted({row["rows"] for row in rows})
    with mpl.rc_context(STYLE):
        figure = styled(9.5, 7.0)
        panels = figure.subplots(2, 2, sharex=True, sharey=True)
        for axes, ((head_dim, causal), found) in zip(panels.flat, kinds.items(), strict=False):
            for provider, (label, color, marker) in ATTENTION.items():
                mine = sorted((r["rows"], r["tops"]) for r in found if r["provider"] == provider)
                if mine:
                    axes.plot(*zip(*mine, strict=True), marker=marker, color=color, label=label)
            axes.set_title(
                f"head_dim {-head_dim}, {'causal' if causal else 'all pairs'}", loc="left"
            )
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [str(length) for length in lengths])
            axes.set_xlim(lengths[0] / 1.2, lengths[-1] * 1.2)
            axes.set_ylim(0, 850)
            grid(axes)
        for axes in panels[-1]:
            axes.set_xlabel("queries and keys")
        for axes in panels[:, 0]:
            axes.set_ylabel("TOP/s")
        panels[0, 0].legend(loc="lower right", fontsize=8.5)
        figure.subplots_adjust(0.075, 0.165, 0.985, 0.95, 0.06, 0.17)
        unmeasured = sorted({r["provider"] for r in result["rows"] if not r.get("tops")})
        names = ", ".join(ATTENTION[provider][0] for provider in unmeasured)
        caption(
            figure,
            "One batch, 32 heads; whole calls from bf16 operands, preparation included; four "
            "operations per visible pair and feature. "
            + (f"Not measured in this run: {names}. " if names else "")
            + environment(result),
        )
    return figure


def sparse_rates(result: dict[str, Any]) -> Figure:
    """Return the rate of sparse attention over the share of blocks that it keeps."""
    dense = {name: ATTENTION[name] for name in ("piper", "cudnn", "flash")}
    case = "H32 S32768 D128"
    rows = [row for row in result["rows"] if row["case"].startswith(case) and row.get("tops")]
    with mpl.rc_context(STYLE):
        figure = styled(9.5, 5.2)
        axes = figure.add_axes((0.075, 0.225, 0.905, 0.705))
        for provider, (label, color, marker) in (SPARSE | dense).items():
            mine = sorted((row["keep"], row["tops"]) for row in rows if row["provider"] == provider)
            if mine:
                axes.plot(
                    *zip(*mine, strict=True),
                    marker=marker,
                    color=color,
                    label=label,
                    linestyle="-" if provider in SPARSE else "--",
                )
        shares = sorted({row["keep"] for row in rows})
        axes.set_xscale("log")
        axes.set_xticks(shares, [f"{100 * share:g} %" for share in shares])
        axes.minorticks_off()
        axes.set_ylim(0, None)
        axes.set_xlabel("blocks of keys that a query block keeps")
        axes.set_ylabel("TOP/s, as if nothing were left out")
        axes.set_title("Sparse attention, 32768 queries and keys, head_dim 128", loc="left")
        axes.legend(loc="upper right", fontsize=9)
        grid(axes)
        caption(
            figure,
            "One batch, 32 heads; whole calls from bf16 operands, preparation and routing "
            "included. Dashed: dense attention in the turns between; it keeps everything. "
            f"{environment(result)}",
        )
    return figure
