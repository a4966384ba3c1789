"""Writes stored results of ``benchmark_cosmos3.py`` as a page."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from _pi05_page import place_and_time, table

_STAGES = ("preprocess", "encode", "prefill", "noise", "denoise", "decode", "postprocess")
_HEAD = """# Cosmos3 latency

Made by `python packages/phyai-engine/benchmarks/benchmark_cosmos3.py --page RESULTS.json`; change
that, not this page. Full-size Nano with random weights and the contract of the DROID policy: one
544 x 736 picture, 33 frames, 32 actions, {tokens} media tokens, 4 steps, guidance 3, both texts
read before. Medians in milliseconds. The floor is the work over 788 TFLOP/s in bf16, or over
1400 TFLOP/s for 8-bit products with attention at 650. `request` is the wall time from pictures on
the host to actions on the host. Attention of the two branches overlaps on two streams: its kernels
wait for each other.

{place}
"""


def page(document: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    policies = document.get("policies", {})
    tokens = next((found["tokens"] for found in policies.values() if "tokens" in found), 3093)
    head = _HEAD.format(tokens=tokens, place=place_and_time(document))
    parts = [head, *_origins(document), *_policies(policies), *_diffusers(document)]
    parts += _video(document)
    return "\n".join([*parts, *_parallel(document), *_kernels(policies)]).rstrip() + "\n"


def _origins(document: Mapping[str, Any]) -> Iterator[str]:
    for part, origin in document.get("origins", {}).items():
        yield f"`{part}` was measured on {origin['date']} at commit {origin['commit']}.\n"


def _policies(policies: Mapping[str, Any]) -> Iterator[str]:
    measured = {name: found for name, found in policies.items() if "ms" in found}
    if measured:
        yield "## DROID policy\n"
        stages = [name for name in _STAGES if any(name in f["ms"] for f in measured.values())]
        rows = [[*_row(name, found, stages)] for name, found in measured.items()]
        yield table(
            ("policy", *stages, "total", "× floor", "request", "GB in use"),
            [*rows, *_floors(measured.values(), stages)],
        )
    compared = {n: f["actions_to_first"] for n, f in policies.items() if "actions_to_first" in f}
    if compared:
        first = next(iter(measured), "")
        yield f"Actions against those of `{first}` from the same noise:\n"
        yield table(
            ("policy", "mean cosine", "least cosine", "largest difference in radians"),
            (
                (
                    f"`{name}`",
                    *(seen[key] for key in ("mean_cosine", "least_cosine", "largest_radians")),
                )
                for name, seen in compared.items()
            ),
        )
    for name, found in policies.items():
        if "error" in found:
            yield f"`{name}` was not measured: {found['error']}\n"


def _row(name: str, found: Mapping[str, Any], stages: Sequence[str]) -> Iterator[object]:
    spent = found["ms"]
    yield f"`{name}`"
    for stage in (*stages, "total"):
        yield f"{spent[stage]['p50']:.2f}" if stage in spent else ""
    yield f"{found['ratio']['total']:.2f}"
    yield f"**{spent['request']['p50']:.1f}**"
    yield f"{found['most_bytes'] / 1e9:.1f}"


def _floors(measured: Iterable[Mapping[str, Any]], stages: Sequence[str]) -> list[list[object]]:
    """Returns one row for each floor that policies were compared with, the highest first."""
    floors = {found["floor_ms"]["total"]: found["floor_ms"] for found in measured}
    names = ("floor in bf16", "floor in 8 bits") if len(floors) > 1 else ("floor",)
    ordered = [floors[total] for total in sorted(floors, reverse=True)]
    return [
        [name, *(f"{floor[s]:.1f}" if s in floor else "" for s in (*stages, "total")), "", "", ""]
        for name, floor in zip(names, ordered, strict=False)
    ]


def _diffusers(document: Mapping[str, Any]) -> Iterator[str]:
    found = document.get("diffusers")
    if not found:
        return
    yield "## diffusers beside the engine in one run\n"
    version = found.get("version", "")
    yield (
        f"diffusers {version}, its own pipeline in bf16 without decoding. It reads both texts at "
        "every step, encodes all frames and has no state row.\n"
    )
    beside = found.get("beside", {})
    if beside:
        spent = ", ".join(f"{name} {value:.1f}" for name, value in beside.items())
        yield f"Requests of the engine in that run: {spent}.\n"
    ours = [*beside.values()]
    if any(mode in found for mode in ("eager", "compiled")):
        yield table(
            ("mode", "request", "transformer", "first request", "times the fastest"),
            (
                (
                    mode,
                    found[mode]["p50_ms"],
                    found[mode]["transformer_ms"],
                    found[mode]["first_ms"],
                    f"{found[mode]['p50_ms'] / min(ours):.2f}" if ours else "",
                )
                for mode in ("eager", "compiled")
                if mode in found
            ),
        )
    if "error" in found:
        yield f"Not measured further: {found['error']}\n"


def _video(document: Mapping[str, Any]) -> Iterator[str]:
    found = document.get("video")
    if not found:
        return
    yield "## One step of a long video\n"
    yield (
        f"720 x 1280, 189 frames, {found['tokens']} media tokens: one forward of one branch, in "
        "bf16 but for rows of policies. SQNR is that of the velocity to the first row's.\n"
    )
    rows = [(name, entry) for name, entry in found["rows"].items() if "ms" in entry]
    first = min(rows[0][1]["ms"]) if rows else 0.0
    yield table(
        ("attention", "milliseconds", "times faster", "SQNR in dB"),
        (
            (name, f"{min(e['ms']):.1f}", f"{first / min(e['ms']):.2f}", e.get("sqnr_db", ""))
            for name, e in rows
        ),
    )
    for name, entry in found["rows"].items():
        if "error" in entry:
            yield f"{name} was not measured: {entry['error']}\n"


def _parallel(document: Mapping[str, Any]) -> Iterator[str]:
    found = document.get("parallel")
    if not found:
        return
    yield "## Two devices\n"
    yield (
        "A guidance branch on each, or half of every layer on each; all without graphs. See also "
        "[Several GPUs](scaling.md).\n"
    )
    shares = {"branches": "a branch each", "layers": "half of every layer each"}
    rows: list[tuple[object, ...]] = []
    missing: list[str] = []
    for name, entry in found.items():
        # Results of before one device had more than its times have those alone.
        alone = entry.get("one_device", {"ms": entry.get("one_device_ms")})
        least = min(alone["ms"]) if "ms" in alone else ""
        for key, how in shares.items():
            if "ms" in entry[key]:
                speedup = entry[key].get("speedup", "")
                rows.append((f"`{name}`", least, how, min(entry[key]["ms"]), speedup))
        failed = {key: part["error"] for key, part in entry.items() if "error" in part}
        missing += [f"`{name}`, {key}, was not measured: {failed[key]}\n" for key in failed]
    yield table(("policy", "one device", "two devices share", "two devices", "times faster"), rows)
    yield from missing


def _kernels(policies: Mapping[str, Any]) -> Iterator[str]:
    for name, found in policies.items():
        if not found.get("longest"):
            continue
        yield f"## Where `{name}` spends its loop\n"
        rows = [
            (f"`{kernel.split('(')[0][:60]}`", count, f"{spent:.0f}", f"{spent / count:.1f}")
            for kernel, count, spent in found["longest"]
        ]
        yield table(("kernel", "launches", "µs", "µs each"), rows)
