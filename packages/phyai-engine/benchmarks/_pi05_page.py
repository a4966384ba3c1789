"""Writes stored results of ``benchmark_pi05.py`` as a page."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_STAGES = ("vision", "prefix", "denoise")
_CLOCKS = {
    "clocks.sm": "multiprocessors",
    "clocks.max.sm": "at most",
    "clocks.mem": "memory",
    "driver_version": "driver",
}
_HEAD = """# π0.5 latency

Made by `python packages/phyai-engine/benchmarks/benchmark_pi05.py --page RESULTS.json`; change
that, not this page. Full-size π0.5 with random weights, ten Euler steps, {replays} replays of each
CUDA graph timed by events: medians in milliseconds. The floor is the work of a chunk over
790 TFLOP/s and 4.3 TB/s, what an H200 reaches in bf16; for quantized policies it is that of bf16
too. `request` is the median wall time from inputs on the host to actions on the host. A section
has the name of a policy and shows that policy as it was at the commit below.

{place}

![Stages of a chunk with their floors, and what others publish](images/performance/pi05-stages.svg)
"""


def page(document: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    head = _HEAD.format(replays=document["replays"], place=place_and_time(document))
    parts = [head, *_policies(document["policies"]), *_lerobot(document)]
    return "\n".join(parts).rstrip() + "\n"


def place_and_time(document: Mapping[str, Any]) -> str:
    """Return device, clocks, versions, commit and date of a result as one sentence."""
    place = document["environment"]
    clocks = ", ".join(
        f"{label} {place['clocks'][name]}"
        for name, label in _CLOCKS.items()
        if place["clocks"].get(name)
    )
    versions = ", ".join(f"{name} {value}" for name, value in place["versions"].items())
    return (
        f"{place['device']} ({clocks}), {versions}, commit {place['commit']}, {document['date']}."
    )


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table."""
    names = [*columns]
    lines = [f"| {' | '.join(names)} |", f"|{'|'.join(' --- ' for _ in names)}|"]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _policies(policies: Mapping[str, Any]) -> Iterator[str]:
    for name, found in policies.items():
        yield f"## {name}\n"
        if "error" in found:
            yield f"Not measured: {found['error']}\n"
        if found.get("results"):
            yield table(
                ("setting", *_STAGES, "chunk", "p99", "floor", "× floor", "request", "kernels"),
                (_row(result) for result in found["results"]),
            )
            yield from _gaps(found["results"][0])
        if "accuracy" in found:
            seen = found["accuracy"]
            yield (
                f"Against the reference kernels in fp32 on {seen['inputs']} inputs: mean cosine "
                f"{seen['mean_cosine']:.6f}, least {seen['least_cosine']:.6f}, largest relative "
                f"error {seen['largest_relative_error']:.4f} of the way from noise to actions.\n"
            )


def _row(result: Mapping[str, Any]) -> Iterator[object]:
    spent, floor, ratio = result["ms"], result["floor_ms"], result["ratio"]
    yield result["setting"]["name"]
    for stage in _STAGES:
        yield f"{spent[stage]['p50']:.2f} ({ratio[stage]:.1f}\N{NO-BREAK SPACE}×)"
    yield f"**{spent['chunk']['p50']:.2f}**"
    yield f"{spent['chunk']['p99']:.2f}"
    yield f"{floor['total']:.2f}"
    yield f"{ratio['total']:.2f}"
    yield f"{spent['request']['p50']:.2f}"
    yield sum(result["kernels"].values())


def _gaps(result: Mapping[str, Any]) -> Iterator[str]:
    if "longest" not in result:
        return
    yield f"Where the time goes in `{result['setting']['name']}` (one replay, profiler):\n"
    rows = [
        (stage, f"`{name.split('(')[0][:60]}`", count, f"{spent:.0f}", f"{spent / count:.1f}")
        for stage, kernels in result["longest"].items()
        for name, count, spent in kernels[:8]
    ]
    yield table(("stage", "kernel", "launches", "µs", "µs each"), rows)


def _lerobot(document: Mapping[str, Any]) -> Iterator[str]:
    found = document.get("lerobot")
    if found is None:
        return
    yield "## LeRobot in the same run\n"
    if "error" in found:
        yield f"Not measured: {found['error']}\n"
        return
    ours = {
        name: policy["results"][0]["ms"]["request"]["p50"]
        for name, policy in document["policies"].items()
        if policy.get("results")
    }
    rows = [
        (
            mode if found[mode].get("mode") is None else f"{mode}, {found[mode]['mode']}",
            found[mode]["p50_ms"],
            found[mode]["most_ms"],
            *(f"{found[mode]['p50_ms'] / spent:.1f}" for spent in ours.values()),
        )
        for mode in ("eager", "compiled")
        if mode in found
    ]
    yield (
        f"LeRobot {found['version']}, bf16, 3 views, 200 slots, inputs on the device. `step` is "
        "its denoise step compiled alone, other modes compile the whole chunk. Over our requests, "
        "which start from inputs on the host:\n"
    )
    heads = (f"over `{name}` ({spent:.2f} ms)" for name, spent in ours.items())
    yield table(("mode", "p50 ms", "most ms", *heads), rows)
