"""Fixtures and test-run policy that every test of the workspace shares."""

import gc
import importlib.util
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers already use every core; more threads in each only makes them wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["pytester"]

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # The same examples in every run, and no limit that a busy machine exceeds.
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile("repeatable")

KNOWN_FAILURES = Path(__file__).parent / "tests" / "known_failures.toml"

MAX_CPU_WORKERS = 16  # beyond this, starting workers costs more than they save
MAX_GPU_WORKERS = 8  # every worker allocates on the same device


@cache
def device_missing_reason() -> str | None:
    """Return why no accelerator can run tests here, or None when one can."""
    import torch

    if torch.cuda.is_available():
        return None
    build = "CUDA" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU-only"
    return f"needs a CUDA or ROCm device: this {build} build of torch {torch.__version__} sees none"


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Iterator[None]:
    """Cap the workers of ``-n auto``; PYTEST_XDIST_AUTO_NUM_WORKERS is taken as it is."""
    workers = yield
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return workers
    return min(workers, MAX_CPU_WORKERS if device_missing_reason() else MAX_GPU_WORKERS)


def known_failures() -> dict[str, str]:
    """Return the ledger of known failures: test id without its worker, and the reason."""
    entries = tomllib.loads(KNOWN_FAILURES.read_text(encoding="utf-8"))
    return {entry["test"]: entry["reason"] for entry in entries["failure"]}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect the failures of the ledger; one that passes unexpectedly fails the run."""
    reasons = known_failures()
    for item in items:
        if item.nodeid in reasons:
            item.add_marker(pytest.mark.xfail(reason=reasons[item.nodeid], strict=True))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a ``gpu`` test, with the reason, where there is no device or too small a one."""
    if item.get_closest_marker("gpu") and (reason := device_missing_reason()):
        pytest.skip(reason)
    marker = item.get_closest_marker("device_memory")
    if marker is None:
        return
    if "large_device_memory" not in getattr(item, "fixturenames", ()):
        pytest.fail("a test with device_memory must use the fixture large_device_memory", False)
    found = device_memory_gib()
    if found < marker.kwargs["gib"]:
        pytest.skip(f"needs {marker.kwargs['gib']} GiB of device memory, found {found:.0f}")


def device_memory_gib() -> float:
    """Return the memory of the first device in GiB, 0 without one."""
    import torch

    if device_missing_reason() is not None:
        return 0.0
    return torch.cuda.get_device_properties(0).total_memory / 2**30


@pytest.fixture
def large_device_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run the test alone among those that ask for this fixture, across all xdist workers.

    For tests that allocate gigabytes on the device or start further GPU processes. The cached
    memory of this worker is returned before the next one starts. How much a test needs is said
    with ``@pytest.mark.device_memory(gib=N)``: smaller devices skip it, with the reason.
    """
    from filelock import FileLock

    # The parent of a worker's base directory is common to all the workers of one run.
    with FileLock(tmp_path_factory.getbasetemp().parent / "large_device_memory.lock"):
        try:
            yield
        finally:
            gc.collect()
            if device_missing_reason() is None:
                import torch

                torch.cuda.empty_cache()


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test without the user's PHYAI_ variables, and PyTorch in one thread."""
    import torch

    for name in [name for name in os.environ if name.startswith("PHYAI_")]:
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run_kernel_checks() -> Callable[..., None]:
    """Return what runs a script of kernel checks in a process of its own.

    ``run(script)`` runs the kernels in Triton's interpreter, which has to be chosen before they are
    imported; ``run(script, "cuda")`` on the device. The script ends with "checks passed".
    """

    def run(script: Path, *arguments: str) -> None:
        result = subprocess.run(
            [sys.executable, str(script), *arguments],
            env=os.environ | ({} if arguments else {"TRITON_INTERPRET": "1"}),
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert "checks passed" in result.stdout

    return run


def fill_with_garbage(tensor: Any) -> Any:
    """Fill a fresh tensor with NaN, with the largest integer or with True; return it.

    A dtype that cannot be filled, such as packed FP4, is filled through its bytes. A wrapper
    subclass is returned as it is: its inner tensors were filled when they were allocated.
    """
    import torch

    if hasattr(tensor, "__tensor_flatten__"):
        return tensor
    with torch.no_grad():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            try:
                tensor.fill_(float("nan"))
            except (NotImplementedError, RuntimeError):
                tensor.view(torch.uint8).fill_(0xFF)
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


def _filled(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an allocator so that what it returns holds garbage that no test can miss."""

    def allocate_filled(*args: Any, **kwargs: Any) -> Any:
        return fill_with_garbage(allocate(*args, **kwargs))

    return allocate_filled


@pytest.fixture
def nan_filled_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make uninitialised tensors hold NaN (floats), the largest value (integers) or True.

    A kernel that leaves an element of its output unwritten then fails the comparison, instead of
    passing on whatever the allocator returned. Covers the Python entry points ``torch.empty``,
    ``empty_like``, ``empty_strided``, ``Tensor.new_empty`` and ``Tensor.new_empty_strided``.
    """
    import torch

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _filled(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, _filled(getattr(torch.Tensor, name)))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """Records graphs on the CPU; a replay calls the function again. Lists what was recorded."""
    import torch

    from phyai.runtime import graphs

    functions: list[Callable[[], Any]] = []

    def record(function: Callable[[], Any], *_: object) -> tuple[Any, Callable[[], Any]]:
        functions.append(function)
        output = function()
        return output, lambda: output.copy_(function())

    monkeypatch.setattr(graphs, "_cuda_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(graphs, "_run_on_side_stream", lambda function, *_: function())
    monkeypatch.setattr(graphs, "_record", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return functions
