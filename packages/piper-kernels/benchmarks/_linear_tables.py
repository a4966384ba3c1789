"""Tables of measured linears and feed-forward networks."""

from _linear_providers import PROVIDERS
from _report import table


def number(value: float | None) -> str | None:
    """Return a number with three digits, ``None`` for ``None``."""
    return None if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def linear_table(rows: list[dict]) -> str:
    """Return the table of one case: a line for each provider."""
    header = [
        "provider",
        "preparation ms",
        "product ms",
        "total ms",
        "p10–p90",
        "product TOP/s",
        "total TOP/s",
        "× bf16",
        "SQNR dB",
        "cosine",
        "host µs",
    ]
    lines = []
    for row in rows:
        label = PROVIDERS[row["provider"]].label
        if "phases" not in row:
            reason = row.get("skipped") or row.get("error") or "not measured"
            lines.append([label, reason, *[None] * (len(header) - 2)])
            continue
        times = [row["phases"].get(phase, {}).get("ms") for phase in ("preparation", "product")]
        total = row["phases"]["total"]
        cosine = None if row["cosine"] is None else f"{row['cosine']:.5f}"
        lines.append(
            [label, *map(number, times), number(total["ms"])]
            + [f"{number(total['p10'])}–{number(total['p90'])}"]
            + [number(row.get(name)) for name in ("product_tops", "tops", "times_bf16", "sqnr_db")]
            + [cosine, number(row.get("host_us"))]
        )
    return table(header, lines)


def targets_table(targets: list[dict]) -> str:
    """Return what was required and found."""
    lines = [
        [
            entry["target"],
            entry["case"],
            f"≥ {entry['required']:g}",
            number(entry["found"]),
            "yes" if entry["met"] else "no",
        ]
        for entry in targets
    ]
    return table(["target", "case", "required", "found", "met"], lines)


def preparation_table(rows: list[dict]) -> str:
    """Return the INT8 preparations beside a copy of the same least traffic."""
    lines = [
        [
            row["case"],
            number(row["phases"]["preparation"]["ms"]),
            number(row["preparation_gbps"]),
            f"{100 * row['of_copy']:.0f} %",
        ]
        for row in rows
        if "of_copy" in row
    ]
    return table(["case", "ms", "GB/s", "of copy"], lines)
