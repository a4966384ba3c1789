"""Tables of measured attention."""

from _attention_phases import PHASES
from _attention_providers import PROVIDERS
from _linear_tables import number
from _report import table

LABELS = {name: provider.label for name, provider in PROVIDERS.items()} | {
    "sparse_minmax": "Sparse Piper, minmax",
    "sparse_mean": "Sparse Piper, mean",
}


def _missing(row: dict, columns: int) -> list[object]:
    reason = row.get("skipped") or row.get("error") or "not measured"
    return [LABELS[row["provider"]], reason.splitlines()[0][:80], *[None] * (columns - 2)]


def attention_table(rows: list[dict]) -> str:
    """Return the table of one case: a line for each provider."""
    header = ["provider", *(f"{phase} ms" for phase in PHASES), "total ms", "p10–p90", "TOP/s"]
    sparse = any("kept_tops" in row for row in rows)
    header += [*(["kept TOP/s"] if sparse else []), "× cuDNN"]
    alone = any("sustained_ms" in row for row in rows)
    header += ["alone ms", "alone × cuDNN"] if alone else []
    header += [] if sparse else ["SQNR dB", "worst head dB", "cosine"]
    lines = []
    for row in rows:
        if "ms" not in row:
            lines.append(_missing(row, len(header)))
            continue
        line = [LABELS[row["provider"]]]
        line += [number(row["phases"].get(phase)) for phase in PHASES]
        line += [number(row["ms"]), f"{number(row['p10'])}–{number(row['p90'])}"]
        line += [number(row["tops"])]
        line += [number(row.get("kept_tops"))] if sparse else []
        line += [number(row["times_cudnn"])]
        if alone:
            line += [number(row.get(key)) for key in ("sustained_ms", "sustained_times_cudnn")]
        if not sparse:
            line += [number(row["sqnr_db"]), number(row["worst_head_db"])]
            line += [None if row["cosine"] is None else f"{row['cosine']:.5f}"]
        lines.append(line)
    return table(header, lines)


def quality_table(rows: list[dict]) -> str:
    """Return what results of every kind of operands are from the exact ones."""
    header = ["operands", "case", "provider", "SQNR dB", "worst head dB", "relative L1"]
    header += ["relative L2", "cosine"]
    lines = []
    for row in rows:
        if "cosine" not in row:
            lines.append([row["operands"], row["case"], *_missing(row, len(header) - 2)])
            continue
        lines.append(
            [row["operands"], row["case"], LABELS[row["provider"]]]
            + [number(row[name]) for name in ("sqnr_db", "worst_head_db")]
            + [
                None if row[name] is None else f"{row[name]:.5f}"
                for name in ("relative_l1", "relative_l2", "cosine")
            ]
        )
    return table(header, lines)


def targets_table(targets: list[dict]) -> str:
    """Return what was required and found."""
    lines = [
        [
            entry["target"],
            entry["case"],
            LABELS[entry["provider"]],
            f"≥ {entry['required']:g}",
            number(entry["found"]),
            number(entry.get("alone")),
            "yes" if entry["met"] else "no",
        ]
        for entry in targets
    ]
    return table(["target", "case", "provider", "required", "found", "alone", "met"], lines)
