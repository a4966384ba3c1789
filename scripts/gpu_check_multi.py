"""Measure on all GPUs of this machine what is built for many of them, and store the JSON.

    python scripts/gpu_check_multi.py [--only PART...] [--checkpoint FOLDER] [--seconds 60]

``cosmos3_nano`` and ``cosmos3_super``, the loop of the DROID policy: one GPU beside all, which
share guidance branches and layers; random weights in the full size, and what the GPUs lack the
memory for is recorded as that. ``pi05``: one replica behind ``phyai serve`` beside one on every
GPU, and one of those killed under load; its checkpoint of random weights is written to a temporary
folder unless one is given. Each result is stored as soon as there is one, and parts that are left
out stay as they were stored before. ``--tiny`` rehearses everything on the CPU with two processes
and stores nothing but ``--json``.
"""

import argparse
import importlib
import json
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _device_run import ROOT, use_this_checkout
from _multi_parts import Cosmos3, Keep, Pi05
from _time_limit import OverLimitError, time_limit

ENGINE = ROOT / "packages" / "phyai-engine" / "benchmarks"
PARTS = ("cosmos3_nano", "cosmos3_super", "pi05")
LEAST = 2
sys.path.insert(0, str(ENGINE))


class Check:
    """What runs one after another; a part that fails does not stop the next.

    Args:
        devices: how many take part.
        output: where results go as they come; what it has of other parts stays.
        environment: what the results are measured on.
        limit: seconds after which a part is stopped.

    Attributes:
        document: what is stored.
        failed: parts of which something has failed.
    """

    def __init__(
        self, devices: int, output: Path | None, environment: dict[str, Any], limit: float
    ) -> None:
        self.output, self.limit, self.environment = output, limit, environment
        self.document: dict[str, Any] = {}
        if output is not None and output.exists():
            self.document = json.loads(output.read_text(encoding="utf-8"))
        self.document["devices"] = devices
        self.failed: list[str] = []
        self._began = time.monotonic()

    def part(self, name: str, measure: Callable[[Keep], None]) -> None:
        """Run a part and store what it finds.

        Args:
            name: of the part.
            measure: is given what to call with the name and the value of every result.
        """
        self._say(f"== {name}")
        found: dict[str, Any] = {
            "date": datetime.now(UTC).date().isoformat(),
            "environment": self.environment,
        }
        self.document[name] = found
        began = time.monotonic()

        def keep(key: str, value: object) -> None:
            if found.get(key) == value:
                return
            found[key] = value
            self._say(f"{name} {key} {json.dumps(value)}")
            self._store()

        try:
            with time_limit(self.limit):
                measure(keep)
        except (Exception, OverLimitError) as error:  # the other parts are still worth measuring
            traceback.print_exc()
            found["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        except BaseException:
            found["error"] = "stopped before its end"
            raise
        finally:
            found["seconds"] = round(time.monotonic() - began, 1)
            self._store()
            self._say(f"{name} took {found['seconds']} s")
            if has_error(found):
                self.failed.append(name)

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:.0f} s] {text}", flush=True)

    def _store(self) -> None:
        importlib.import_module("_results").store(self.document, self.output)


def has_error(found: dict[str, Any]) -> bool:
    """Return whether a result or one inside it is an error."""
    inside = [value for value in found.values() if isinstance(value, dict)]
    return "error" in found or any(has_error(value) for value in inside)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of a part at most")
    parser.add_argument("--checkpoint", type=Path, help="of π0.5; default: random weights")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0, help="of load on all replicas")
    parser.add_argument("--one-seconds", type=float, help="of load on one; default: --seconds")
    parser.add_argument("--kill-seconds", type=float, default=20.0, help="of load around the kill")
    parser.add_argument("--json", type=Path, help="default: the results of the device")
    parser.add_argument("--commit", help="commit to record where git shows another or none")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and return 1 if something failed, 2 without the devices."""
    options = parse(arguments)
    use_this_checkout()
    import torch

    devices = LEAST if options.tiny else torch.cuda.device_count()
    if devices < LEAST:
        print(f"error: {devices} GPUs; this check needs {LEAST} or more", file=sys.stderr)
        return 2
    device, memory, output = torch.device("cpu"), math.inf, options.json
    if not options.tiny:
        device = torch.device("cuda")
        memory = min(torch.cuda.get_device_properties(n).total_memory for n in range(devices))
        name = torch.cuda.get_device_name(0).lower().replace(" ", "-")
        output = output or ENGINE / "results" / name / f"devices-{devices}.json"
    environment = importlib.import_module("_environment").environment(device, options.commit)
    check = Check(devices, output, environment, options.limit)
    cosmos3 = Cosmos3(devices, memory, tiny=options.tiny)
    measures: dict[str, Callable[[Keep], None]] = {
        "cosmos3_nano": lambda keep: cosmos3.measure(keep, large=False),
        "cosmos3_super": lambda keep: cosmos3.measure(keep, large=True),
        "pi05": Pi05(options, devices, ENGINE).measure,
    }
    for part in [part for part in PARTS if part in options.only]:
        check.part(part, measures[part])
    for part in check.failed:
        print(f"failed: {part}", file=sys.stderr)
    return int(bool(check.failed))


def stop(*_: object) -> None:
    """End in order at SIGTERM, once: what was started ends, and the part says it was stopped."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
