"""Write the page on several GPUs and its picture from all results of them that are stored.

    python scripts/scaling_page.py [--check]

Reads what ``gpu_check_multi.py`` stores as ``devices-N.json`` in
``packages/phyai-engine/benchmarks/results/nvidia-h200/`` and writes ``docs/scaling.md`` and
``docs/images/performance/scaling.svg``. With ``--check`` it writes nothing and fails where a stored
file differs, pictures up to rounding.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _plot_scaling import MODELS, SHARES, grid_key, scaling
from _plot_style import svg
from plot_results import same

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "packages" / "phyai-engine" / "benchmarks"
RESULTS = BENCHMARKS / "results" / "nvidia-h200"
PAGE, PICTURE = "scaling.md", "images/performance/scaling.svg"
HOW = {"branches": "a branch each", "layers": "every layer"}
Document = dict[str, Any]

HEAD = """# Several GPUs

Made by `python scripts/scaling_page.py` from what `python scripts/gpu_check_multi.py` stores;
change that, not this page.
"""
NONE = """
No run of it is stored yet. Two GPUs that share Cosmos3 stand in
[Cosmos3 latency](cosmos3-performance.md#two-devices), two replicas of π0.5 in
[Serving](serving.md#measured).
"""
COSMOS3 = """## Cosmos3 on several GPUs

Full-size models with random weights, the loop of the DROID policy from noise to actions and video
latents: 3093 media tokens, 4 steps, guidance 3, both texts read before, `cosmos3_h200`, no CUDA
graphs. The least of three runs, beside one GPU in the same run. *A branch each*: each half of the
GPUs computes one of the two guidance branches, and the GPUs of a half share every layer. *Every
layer*: all GPUs share every layer. GB are the most that a rank had in use, weights included.
"""
DIFFERENCES = """Relative differences, the norm of the difference over that of the result, of the
video latents and of the actions. One GPU is itself as far from the result in fp32 as bf16 rounds;
GPUs that share layers add in another order and round elsewhere. Sharing loses nothing where it is
no farther from fp32 than one GPU.
"""
PI05 = """## Replicas of π0.5

Full-size π0.5 with random weights behind `phyai serve`, `pi05_h200`, one replica on every GPU;
clients on the same machine ask over loopback as soon as they have their reply.
"""
KILLED = """One replica is killed with SIGKILL under that load. *Lost* are requests without a chunk;
*moved* those that went to another replica.
"""


def stored(folder: Path) -> list[Document]:
    """Return the stored results, the fewest GPUs first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("devices-*.json")]
    return sorted(found, key=lambda document: document["devices"])


def page(documents: Sequence[Document]) -> str:
    """Return the page as Markdown."""
    if not documents:
        return HEAD + NONE
    picture = f"![How many times faster several GPUs are, and what each holds]({PICTURE})\n"
    parts = [HEAD, picture, *_cosmos3(documents), *_pi05(documents), *_origins(documents)]
    return "\n".join(parts).rstrip() + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    return importlib.import_module("_pi05_page").table(columns, rows)


def _shares(documents: Sequence[Document], model: str) -> Iterator[tuple[int, str, Any, Any]]:
    """Yield number of GPUs, how they share a model, one GPU's result and theirs."""
    for document in documents:
        found = document.get(model, {})
        for share in SHARES:
            key = grid_key(document["devices"], share)
            if "ms" in found.get(key, {}):
                alone = found.get("one_device", {})
                yield document["devices"], HOW[share], alone, found[key]


def _cosmos3(documents: Sequence[Document]) -> Iterator[str]:
    rows = {model: [*_shares(documents, model)] for model in MODELS}
    if any(rows.values()):
        yield COSMOS3
        columns = ("model", "GPUs", "shared", "one GPU ms", "all ms", "times faster")
        yield table(
            (*columns, "GB of one GPU", "GB of each rank"),
            [
                (
                    *(MODELS[model], devices, how, _least(alone), _least(found)),
                    *(found.get("speedup", ""), _gigabytes(alone), _gigabytes(found)),
                )
                for model in MODELS
                for devices, how, alone, found in rows[model]
            ],
        )
    compared = [(model, *row) for model in MODELS for row in rows[model] if "difference" in row[3]]
    if compared:
        yield DIFFERENCES
        columns = ("model", "GPUs", "shared", "what", "to one GPU", "to fp32", "one GPU to fp32")
        yield table(
            columns,
            [
                (
                    *(MODELS[model], devices, how, what, _figure(found, "difference", what)),
                    _figure(found, "difference_to_fp32", what),
                    _figure(alone, "difference_to_fp32", what),
                )
                for model, devices, how, alone, found in compared
                for what in found["difference"]
            ],
        )
    for document in documents:
        for model, name in MODELS.items():
            yield from _missing(f"{name} on {document['devices']} GPUs", document.get(model, {}))


def _missing(name: str, found: Document) -> Iterator[str]:
    if "error" in found:
        yield f"{name} was not measured to its end: {found['error']}.\n"
    labels = {"one_device": "one GPU", "fp32": "the result in fp32"} | HOW
    for key, part in found.items():
        why = part.get("error", part.get("reason")) if isinstance(part, dict) else None
        if why is not None:
            yield f"{name}, {labels.get(key, key)}, was not measured: {why}.\n"


def _least(found: Document) -> str:
    return f"{min(found['ms']):.1f}" if "ms" in found else ""


def _gigabytes(found: Document) -> str:
    sizes = [f"{size / 1e9:.1f}" for size in found.get("most_bytes", ())]
    return sizes[0] if len({*sizes}) == 1 else ", ".join(sizes)


def _figure(found: Document, key: str, what: str) -> str:
    return f"{found[key][what]:.3g}" if key in found else ""


def _pi05(documents: Sequence[Document]) -> Iterator[str]:
    servers = [
        (document["devices"], name, document["pi05"][name], document["pi05"])
        for document in documents
        for name in ("one", "many")
        if name in document.get("pi05", {})
    ]
    if servers:
        yield PI05
        names = ("p50 ms", "p90 ms", "p99 ms", "chunks/s", "batch")
        columns = ("GPUs", "replicas", "clients", "seconds", *names, "times one", "ready s")
        yield table(
            columns,
            [
                (
                    *(devices, server["replicas"], f"{row['clients']:.0f}", row["seconds"]),
                    *(f"{row[column]:.{int(column in names[3:])}f}" for column in names),
                    pi05.get("speedup", "") if name == "many" else "",
                    server["ready_s"],
                )
                for devices, name, server, pi05 in servers
                for row in server["rows"]
            ],
        )
    killed = [(devices, found["killed"]) for devices, _, found, _ in servers if "killed" in found]
    if killed:
        yield KILLED
        columns = ("clients", "requests", "replies", "lost", "moved", "longest_s", "back_after_s")
        titles = (*columns[:-2], "longest reply s", "replica back after s")
        rows = [(devices, *(found[name] for name in columns)) for devices, found in killed]
        yield table(("GPUs", *titles), rows)
    for document in documents:
        yield from _missing(f"π0.5 on {document['devices']} GPUs", document.get("pi05", {}))


def _origins(documents: Sequence[Document]) -> Iterator[str]:
    """Yield where and when the results were measured, once for parts of one run."""
    sentence = importlib.import_module("_pi05_page").place_and_time
    places: dict[str, list[str]] = {}
    for document in documents:
        for key, name in {**MODELS, "pi05": "π0.5"}.items():
            if "environment" in document.get(key, {}):
                place = f"{document['devices']} × {sentence(document[key])}"
                places.setdefault(place, []).append(name)
    if places:
        yield "## Where\n"
    for place, names in places.items():
        yield f"{', '.join(names)}: {place}\n"


def files(documents: Sequence[Document]) -> dict[str, str]:
    """Return the contents of page and picture; without results there is no picture."""
    found = {PAGE: page(documents)}
    if documents:
        found[PICTURE] = svg(scaling(documents))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check page and picture; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of devices-*.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the page")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(BENCHMARKS))
    stale = []
    for name, text in files(stored(options.results)).items():
        path = options.docs / name
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            continue
        found = path.read_text(encoding="utf-8") if path.exists() else ""
        if not (same(found, text) if name == PICTURE else found == text):
            stale.append(str(path))
    if stale:
        print(f"not what the results say, run scripts/scaling_page.py: {', '.join(stale)}")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
