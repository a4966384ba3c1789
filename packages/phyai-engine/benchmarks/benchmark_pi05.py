"""Latency of π0.5, full size with random weights, against its floor and against LeRobot.

    python packages/phyai-engine/benchmarks/benchmark_pi05.py --output results.json
    python packages/phyai-engine/benchmarks/benchmark_pi05.py --page results.json

The first command times the three settings with published latencies (and batches with ``--batch``)
for every ``--policy`` (without one, for the default rows), compares the actions with those of the
reference kernels in fp32, and with ``--lerobot`` times LeRobot's own policy in the same run. The
second writes ``docs/pi05-performance.md`` from the stored file.
"""

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from _environment import environment
from _lerobot import time_lerobot
from _pi05_page import page
from _results import store

from phyai.models.pi05.accuracy import compare_with_reference
from phyai.models.pi05.bench import ANCHORS, Setting, measure_all

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "pi05-performance.md"


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every policy; what one of them cannot do is stored as its error."""
    device = torch.device("cuda", 0)
    settings = [*ANCHORS]
    settings += [Setting(f"batch {size}", 3, 200, batch=size) for size in arguments.batch]
    document: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "environment": environment(device, arguments.commit),
        "replays": arguments.replays,
        "policies": {},
    }
    policies: list[Path | None] = [*arguments.policy] or [None]
    names = ["default" if policy is None else policy.stem for policy in policies]
    for name, policy in zip(names, policies, strict=True):
        document["policies"][name] = entry = dict[str, Any](results=[])
        for found in _policy(policy, settings, arguments):
            if isinstance(found, str):
                entry["error"] = found
            else:
                entry["results"].append(found)
            store(document, arguments.output)
        _free()
    if arguments.inputs:
        found = compare_with_reference(policies, "cuda", inputs=arguments.inputs)
        for name, accuracy in zip(names, found, strict=True):
            print(name, accuracy, flush=True)
            document["policies"][name]["accuracy"] = accuracy
            store(document, arguments.output)
        _free()
    if arguments.lerobot:
        document["lerobot"] = time_lerobot(device, compile_mode=arguments.compile)
        store(document, arguments.output)
    return document


def _policy(
    policy: Path | None, settings: Sequence[Setting], arguments: argparse.Namespace
) -> Iterator[dict[str, Any] | str]:
    """Yield the result of each setting, and last the error that ended them if there was one."""
    try:
        for found in measure_all(
            settings, "cuda", policy, replays=arguments.replays, kernels=arguments.kernels
        ):
            spent = {stage: values["p50"] for stage, values in found["ms"].items()}
            print(policy, found["setting"]["name"], spent, found["ratio"]["total"], flush=True)
            yield found
    except Exception as error:  # the other policies are still worth measuring
        print(policy, error, file=sys.stderr)
        yield f"{type(error).__name__}: {error}"


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, then measure or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", type=Path, action="append", default=[])
    parser.add_argument("--batch", type=int, action="append", default=[])
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--inputs", type=int, default=64, help="compared with fp32; 0 for none")
    parser.add_argument("--kernels", type=int, default=12, help="listed for each stage")
    parser.add_argument("--lerobot", action="store_true")
    parser.add_argument(
        "--compile",
        nargs="?",
        const="max-autotune",
        metavar="MODE",
        help="also LeRobot's compiled policy, in its own mode unless another is named; "
        "step compiles its denoise step alone",
    )
    parser.add_argument("--commit", help="commit to record where git shows another or none")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--page", type=Path, help="stored results to write the page from")
    arguments = parser.parse_args(argv)
    if arguments.page is not None:
        PAGE.write_text(page(json.loads(arguments.page.read_text())), encoding="utf-8")
        return
    if not torch.cuda.is_available():
        parser.error("this benchmark needs an NVIDIA GPU")
    run(arguments)


if __name__ == "__main__":
    main()
