"""What the device checks share: use this checkout, name the device, refuse to run without it."""

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


class DeviceMissingError(RuntimeError):
    """The device that a check is for is not here."""


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


def run_device_tests(
    arguments: list[str], *, vendor: str, architectures: tuple[str, ...] = ()
) -> int:
    """Run the ``gpu`` tests with extra pytest arguments and return the exit status.

    An absent device, and a selection that holds no test, are failures.
    """
    use_this_checkout()
    import pytest
    import torch

    try:
        require_device(torch, vendor=vendor, architectures=architectures)
    except DeviceMissingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(torch), flush=True)
    # Serial: device memory stays bounded and kernel caches are seen by one process.
    return int(pytest.main(["-m", "gpu", "-p", "no:xdist", *arguments]))
