"""What a measurement is valid for: one workload on one device with one set of versions."""

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from phyai.dispatch.facts import Facts
from phyai.dispatch.library import DISTRIBUTIONS
from phyai.dispatch.types import DeviceProfile

ROW_DIMS = ("shape.M", "shape.tokens", "shape.kv_tokens")
"""Dims that vary from call to call; their values are measured once per bucket."""

_IDENTITIES = ("attrs.layer_id", "attrs.rank")
_ALSO = ("nvidia-cudnn-frontend", "phyai-engine", "phyai-quant", "torch")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def bucket(size: int) -> int:
    """Returns the bucket of a row count: the next power of two, 0 for 0."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


@dataclass(frozen=True)
class Workload:
    """The key of a measurement.

    Attributes:
        content: catalog version, facts, device and versions, JSON-able.
    """

    content: Mapping[str, Any]

    @cached_property
    def digest(self) -> str:
        """32 hex digits of the SHA-256 of the content."""
        text = json.dumps(self.content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @classmethod
    def of(cls, catalog_version: str, facts: Facts, device: DeviceProfile | None) -> "Workload":
        """Returns the workload of a call.

        Row counts count as their bucket. Facts that tell equal calls apart (the index of a layer,
        the rank) and library probes, whose versions are recorded instead, are left out. So is the
        mode: a measurement made eagerly serves a captured call.
        """
        values = {
            path: bucket(value) if path in ROW_DIMS and isinstance(value, int) else value
            for path, value in facts.as_dict().items()
            if path not in _IDENTITIES and not path.startswith("lib.")
        }
        return cls(
            {
                "catalog": catalog_version,
                "facts": values,
                "device": dict(device_identity(device)),
                "versions": dict(versions()),
            }
        )


@lru_cache(maxsize=1)
def versions() -> Mapping[str, str]:
    """Returns the versions of torch, of this package and of the libraries that rows call."""
    found = {}
    for package in sorted({*_ALSO, *DISTRIBUTIONS.values()}):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@lru_cache(maxsize=16)
def device_identity(device: DeviceProfile | None) -> Mapping[str, Any]:
    """Returns name, size, driver and runtime of a GPU, or machine and threads of a CPU.

    A profile of a GPU that this machine lacks has its vendor and architecture alone.
    """
    import torch

    vendor = "" if device is None else device.vendor
    if vendor == "cpu":
        name = platform.processor() or platform.machine()
        return {"name": name, "threads": torch.get_num_threads()}
    usable = vendor in {"nvidia", "amd"} and torch.cuda.is_available()
    if device is None or not usable:
        return {"name": vendor, "arch": device.arch if device else None}
    properties = torch.cuda.get_device_properties(device.index or 0)
    return {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def driver_version(file: Path = _DRIVER_FILE) -> str | None:
    """Returns the version of the GPU's kernel driver, else the CUDA version that it offers."""
    try:
        found = re.search(r"Kernel Module\b.*?\s(\d+\.[\d.]+)", file.read_text(encoding="utf-8"))
    except OSError:
        found = None
    if found is not None:
        return found[1]
    import torch

    offered = getattr(torch._C, "_cuda_getDriverVersion", None)
    return None if offered is None else f"cuda {offered()}"
