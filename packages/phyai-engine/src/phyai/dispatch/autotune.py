"""Measured winners: how they are found, keyed and kept."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from phyai.dispatch.facts import Facts
from phyai.dispatch.library import DISTRIBUTIONS
from phyai.dispatch.opspec import Impl
from phyai.dispatch.types import DeviceProfile

if TYPE_CHECKING:
    from phyai.dispatch.selection import Selection

Benchmark = Callable[[Impl, Facts, "Selection"], float]
"""Returns milliseconds per call; an exception skips the row."""

_ROW_DIMS = ("shape.M", "shape.tokens")


class Tuner:
    """Measures prepared rows and remembers the winner of each workload.

    Args:
        benchmark: measures one prepared row; None disables measuring and recalling.
        cache: JSON file of winners; None keeps them in memory.
    """

    def __init__(self, benchmark: Benchmark | None, cache: str | Path | None) -> None:
        if benchmark is not None and not callable(benchmark):
            raise TypeError(f"benchmark must be callable, got {type(benchmark).__name__}")
        self._benchmark = benchmark
        self._path = Path(cache).expanduser() if cache is not None else None
        self._winners: dict[str, str] = _read(self._path) if self._path else {}

    @property
    def enabled(self) -> bool:
        """Whether rows can be measured."""
        return self._benchmark is not None

    def key(
        self,
        catalog_version: str,
        policy_version: str,
        facts: Facts,
        rows: Sequence[str],
        device: DeviceProfile | None,
    ) -> str:
        """Returns the workload's key.

        It holds both versions, the facts without the mode, row counts rounded up to a power of
        two, the candidate rows, the device's name and the versions of the libraries.
        """
        values = facts.as_dict()
        for path in _ROW_DIMS:
            if isinstance(values.get(path), int):
                values[path] = 1 << max(values[path] - 1, 0).bit_length()
        content = {
            "catalog": catalog_version,
            "policy": policy_version,
            "facts": values,
            "rows": list(rows),
            "device": _device_name(device),
            "versions": _versions(),
        }
        return json.dumps(content, sort_keys=True, separators=(",", ":"))

    def recall(self, key: str, order: Sequence[Impl]) -> str | None:
        """Returns the stored winner if it is still among the candidates."""
        winner = self._winners.get(key)
        return winner if any(impl.kernel_id == winner for impl in order) else None

    def measure(self, key: str, prepared: Sequence["Selection"]) -> dict[str, float]:
        """Measures every prepared row and stores the fastest; skips rows that raise."""
        times: dict[str, float] = {}
        if self._benchmark is None:
            return times
        for selection in prepared:
            try:
                measured = float(self._benchmark(selection.impl, selection.facts, selection))
            except Exception:  # noqa: S112 - a row that cannot be measured is not a winner
                continue
            times[selection.kernel_id] = measured
        if times:
            self._winners[key] = min(times, key=lambda kernel_id: (times[kernel_id], kernel_id))
            if self._path is not None:
                _write(self._path, {**_read(self._path), **self._winners})
        return times


def _read(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, str)}


def _write(path: Path, winners: dict[str, str]) -> None:
    """Replaces the file in one step, so that a reader never sees half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    except OSError:
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(winners, stream, sort_keys=True, indent=1)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)


@lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    found = {}
    for package in ("torch", *sorted(DISTRIBUTIONS.values())):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@lru_cache(maxsize=16)
def _device_name(device: DeviceProfile | None) -> str:
    if device is None or device.vendor not in {"nvidia", "amd"}:
        return "" if device is None else device.vendor
    import torch

    if not torch.cuda.is_available():
        return device.vendor
    driver = torch.version.hip or torch.version.cuda
    return f"{torch.cuda.get_device_name(device.index or 0)} {driver}"
