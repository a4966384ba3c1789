"""What a result depends on: devices, clocks, versions and commit."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from phyai.dispatch import probe_device

HERE = Path(__file__).resolve().parent
_VERSIONS = ("phyai-engine", "phyai-quant", "flashinfer-python", "humming-kernels", "triton")

_LOAD_CYCLES = 4_000_000_000


def environment(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Return what the result depends on: devices, clocks, versions and commit.

    Args:
        device: what is measured.
        commit: to record; that of the git history if None.
    """
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in _VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    host = {"processor": _processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    found: dict[str, Any] = {
        "device": "cpu",
        "profile": str(probe_device(device)),
        "host": host,
        "clocks": {"cpu_mhz": _cpu_mhz()},
        "versions": versions,
        "commit": commit or _commit(),
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["clocks"] |= _gpu_clocks()
    return found


def _cpu_text(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _processor() -> str:
    return _cpu_text("model name") or platform.processor() or "unknown"


def _cpu_mhz() -> float | None:
    text = _cpu_text("cpu MHz")
    return float(text) if text else None


def _gpu_clocks() -> dict[str, str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    fields = ("clocks.sm", "clocks.mem", "clocks.max.sm", "driver_version")
    query = [tool, "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    torch.cuda._sleep(_LOAD_CYCLES)  # an idle device would report its resting clocks
    found = subprocess.run(query, capture_output=True, text=True, check=False)  # noqa: S603
    torch.cuda.synchronize()
    values = [part.strip() for part in found.stdout.split(",")]
    return dict(zip(fields, values, strict=False))


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],  # noqa: S607
            cwd=HERE,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
