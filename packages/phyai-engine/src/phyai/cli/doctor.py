"""``phyai doctor``: what this machine can run, and why it cannot run the rest."""

import contextlib
import importlib
import importlib.metadata
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from phyai.cli import options
from phyai.cli.output import make_table, print_json, print_line, print_pairs, print_table

WHEELS = ("phyai-engine", "phyai-quant", "piper-kernels")


@dataclass(frozen=True)
class Library:
    """An optional library and what it takes to use it.

    Attributes:
        module: Import name.
        distribution: Name for the installer.
        enables: What PhyAI does with it.
        install: Command that adds it.
        min_sm: Lowest NVIDIA compute capability, e.g. 80; None for a library that needs no GPU.
    """

    module: str
    distribution: str
    enables: str
    install: str
    min_sm: int | None = None


@dataclass(frozen=True)
class LibraryStatus:
    """What `phyai doctor` found out about one library.

    Attributes:
        name: Distribution name.
        version: Installed version, or None.
        usable: Whether PhyAI can call it on this machine.
        enables: What PhyAI does with it.
        reason: Why it is not usable; empty when it is.
    """

    name: str
    version: str | None
    usable: bool
    enables: str
    reason: str


@dataclass(frozen=True)
class Gpu:
    """One GPU as PyTorch reports it.

    Attributes:
        index: Number behind ``cuda:``.
        name: Marketing name.
        vendor: "nvidia" or "amd".
        arch: "sm90", or "gfx1201" on AMD.
        sm: NVIDIA compute capability as a number, e.g. 90; None on AMD.
        memory_gib: Total memory.
    """

    index: int
    name: str
    vendor: str
    arch: str
    sm: int | None
    memory_gib: float


LIBRARIES = (
    Library(
        "flashinfer",
        "flashinfer-python",
        "paged attention, norms and GEMMs on NVIDIA GPUs",
        "pip install flashinfer-python",
        min_sm=75,
    ),
    Library(
        "humming",
        "humming-kernels",
        "INT4, INT8, FP8, MXFP4 and NVFP4 weights made at load time",
        "pip install humming-kernels",
        min_sm=80,
    ),
    Library(
        "triton",
        "triton",
        "fused norms, RoPE, gated activations, ConvRot and attention kernels on GPUs",
        "pip install triton",
        min_sm=75,
    ),
    Library(
        "torchao",
        "torchao",
        "ConvRot weights as tensors that linear layers execute",
        'pip install "piper-kernels[convrot]"',
    ),
    Library(
        "matplotlib",
        "matplotlib",
        "pictures: --plot and --picture",
        'pip install "phyai-engine[plot]"',
    ),
    Library(
        "av",
        "av",
        "clips from and to video files, with sound",
        'pip install "phyai-engine[video]"',
    ),
)


def find_gpus() -> list[Gpu]:
    """Return the GPUs that PyTorch can use, in device order."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        amd = torch.version.hip is not None
        sm = None if amd else properties.major * 10 + properties.minor
        arch = str(properties.gcnArchName).partition(":")[0] if amd else f"sm{sm}"
        memory = properties.total_memory / 2**30
        vendor = "amd" if amd else "nvidia"
        gpus.append(Gpu(index, properties.name, vendor, arch, sm, round(memory, 1)))
    return gpus


def library_status(library: Library, gpus: list[Gpu]) -> LibraryStatus:
    """Return whether `library` is usable beside `gpus`, or the first reason why it is not.

    A library that the GPU rules out is not imported: imports of kernel libraries can start
    compilers.
    """
    try:
        version = importlib.metadata.version(library.distribution)
    except importlib.metadata.PackageNotFoundError:
        reason = f"not installed; {library.install}"
        return LibraryStatus(library.distribution, None, False, library.enables, reason)
    reason = _gpu_reason(library, gpus) or _import_reason(library)
    return LibraryStatus(library.distribution, version, not reason, library.enables, reason)


def _gpu_reason(library: Library, gpus: list[Gpu]) -> str:
    if library.min_sm is None or (library.module == "triton" and any(g.sm is None for g in gpus)):
        return ""
    capabilities = [gpu.sm for gpu in gpus if gpu.sm is not None]
    need = f"needs an NVIDIA GPU of SM{library.min_sm} or newer"
    if not capabilities:
        return f"{need}; this machine has none"
    if max(capabilities) < library.min_sm:
        return f"{need}; the best here is SM{max(capabilities)}"
    return ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the deprecation notices that libraries print about each other at import."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _import_reason(library: Library) -> str:
    try:
        with _quiet():
            importlib.import_module(library.module)
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        return f"import fails: {type(error).__name__}: {first_line}"
    return ""


def _wheel_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for wheel in WHEELS:
        try:
            versions[wheel] = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            versions[wheel] = None
    return versions


def doctor_command(json_output: options.Json = False) -> None:
    """Show Python, PyTorch, GPUs and optional libraries, with the reason for each one unusable."""
    import torch

    from phyai.cli.engines import no_gpu_reason

    # Importing humming starts a build in the background; looking at it shall not.
    os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
    gpus = find_gpus()
    statuses = [library_status(library, gpus) for library in LIBRARIES]
    report: dict[str, Any] = {
        "wheels": _wheel_versions(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
        "cpu_threads": torch.get_num_threads(),
        "cpu_count": os.process_cpu_count() if sys.version_info >= (3, 13) else os.cpu_count(),
        "gpus": [asdict(gpu) for gpu in gpus],
        "no_gpu_reason": "" if gpus else no_gpu_reason(),
        "libraries": [asdict(status) for status in statuses],
    }
    if json_output:
        print_json(report)
        return
    _print_report(report, gpus, statuses)


def _print_report(report: dict[str, Any], gpus: list[Gpu], statuses: list[LibraryStatus]) -> None:
    print_pairs(
        [
            *((name, version or "not installed") for name, version in report["wheels"].items()),
            ("python", f"{report['python']}  {report['executable']}"),
            ("platform", report["platform"]),
            ("torch", report["torch"]),
            ("cpu", f"{report['cpu_threads']} threads for torch, {report['cpu_count']} available"),
            *((f"cuda:{g.index}", f"{g.name}, {g.arch}, {g.memory_gib} GiB") for g in gpus),
            *([] if gpus else [("gpu", f"none: {report['no_gpu_reason']}")]),
        ]
    )
    print_line()
    table = make_table("library", "version", "usable", "enables, or why not")
    for status in statuses:
        usable = "yes" if status.usable else "no"
        text = status.enables if status.usable else f"{status.reason} (for: {status.enables})"
        table.add_row(status.name, status.version or "-", usable, text)
    print_table(table)
