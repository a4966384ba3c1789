"""What the device checks share: use this checkout, name the device, refuse to run without it."""

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


Support = Mapping[str, tuple[bool, str]]
"""By the name of an operation, whether it runs in kernels on the device, or why not."""


class DeviceMissingError(RuntimeError):
    """The device that a check is for, or a kernel for it, is not here."""


def use_this_checkout() -> None:
    """Import the wheels from this checkout, in this process and in those that it starts."""
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    sys.path[:0] = sources
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*sources, *([inherited] if inherited else [])])
    os.chdir(ROOT)


def architecture(torch: ModuleType, index: int = 0) -> str:
    """Return the architecture of a device as policies spell it: ``sm90``, ``gfx1201``."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm{properties.major}{properties.minor}"


def require_device(torch: ModuleType, *, vendor: str, architectures: tuple[str, ...] = ()) -> str:
    """Return the architecture of the first device.

    Raises:
        DeviceMissingError: when there is no device, it is of another vendor, or its architecture
            is not among ``architectures`` (empty: any will do).
    """
    if not torch.cuda.is_available():
        raise DeviceMissingError(
            f"torch {torch.__version__} sees no device; this check needs one from {vendor}"
        )
    found = "amd" if torch.version.hip else "nvidia"
    if found != vendor:
        raise DeviceMissingError(f"the device is from {found}; this check is for {vendor}")
    arch = architecture(torch)
    if architectures and arch not in architectures:
        raise DeviceMissingError(
            f"the device is {arch}; this check is for {', '.join(architectures)}"
        )
    return arch


def installed_version(name: str) -> str:
    """Return the version of an installed distribution, or ``not installed``."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def report(torch: ModuleType) -> str:
    """Return the lines that say where the results were measured."""
    properties = torch.cuda.get_device_properties(0)
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    names = ("triton", "torchao", "flashinfer-python", "humming-kernels")
    return "\n".join(
        [
            f"device   {properties.name} ({architecture(torch)}, "
            f"{properties.total_memory / 2**30:.0f} GiB), {torch.cuda.device_count()} visible",
            f"python   {platform.python_version()} on {platform.platform()}",
            f"torch    {torch.__version__}, {runtime}",
            *(f"{name:<8} {installed_version(name)}" for name in names),
        ]
    )


def machine(torch: ModuleType) -> dict[str, object]:
    """Return checkout, interpreter, versions and device, for tools."""
    names = ("triton", "torchao", "pytest")
    return {
        "checkout": str(ROOT),
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        **{name: installed_version(name) for name in names},
        "gpu": torch.cuda.get_device_properties(0).name,
        "architecture": architecture(torch),
    }


def require_kernels(support: Support) -> None:
    """Refuse a machine on which an operation would silently take its portable reference.

    Raises:
        DeviceMissingError: An operation has no kernel here; the message has all the reasons.
    """
    missing = [f"{name}: {reason}" for name, (usable, reason) in support.items() if not usable]
    if missing:
        raise DeviceMissingError("operations without kernels here: " + "; ".join(missing))


class RanSomething:
    """Counts the tests that ran: a run in which all were skipped is no success."""

    def __init__(self) -> None:
        self.count = 0

    def pytest_runtest_logreport(self, report: object) -> None:
        """Count a test whose body was called and not skipped."""
        ran = getattr(report, "when", "") == "call" and not getattr(report, "skipped", False)
        self.count += ran


def run_device_tests(
    arguments: Sequence[str],
    *,
    vendor: str,
    architectures: tuple[str, ...] = (),
    support: Callable[[], Support] | None = None,
) -> int:
    """Run the ``gpu`` tests with extra pytest arguments and return the exit status.

    An absent device, an operation without kernels, and a selection of which no test runs are
    failures.

    Args:
        arguments: Arguments of pytest.
        vendor: ``"nvidia"`` or ``"amd"``.
        architectures: Accepted architectures; empty for any.
        support: Asked before tests are collected, which operations run in kernels.
    """
    use_this_checkout()
    import pytest
    import torch

    try:
        require_device(torch, vendor=vendor, architectures=architectures)
        print(report(torch))
        print(json.dumps(machine(torch)), flush=True)
        require_kernels({} if support is None else support())
    except DeviceMissingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # Serial: device memory stays bounded and kernel caches are seen by one process.
    ran = RanSomething()
    status = int(pytest.main(["-m", "gpu", "-ra", "-p", "no:xdist", *arguments], plugins=[ran]))
    if status == 0 and not ran.count and "--collect-only" not in arguments:
        print("error: every test was skipped", file=sys.stderr)
        return 2
    return status
