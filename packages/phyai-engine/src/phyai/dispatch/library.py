"""Whether an optional library is usable, asked once per process and only when a row needs it."""

import importlib
import importlib.util
import re
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, requires, version

from phyai.dispatch.device import has_real_gpu

DISTRIBUTIONS = {
    "cudnn": "nvidia-cudnn-frontend",
    "fla": "flash-linear-attention",
    "flash_qla": "flash-qla",
    "flashinfer": "flashinfer-python",
    "humming": "humming-kernels",
    "piper_kernels": "piper-kernels",
    "torchao": "torchao",
    "triton": "triton",
}


@lru_cache(maxsize=64)
def library_problem(name: str) -> str | None:
    """Returns why the library cannot be used, or None if it can.

    A release before the one that this package asks for cannot. On a host with a GPU the library is
    imported, and any exception counts as unusable. Without a GPU nothing is imported, because
    importing a GPU library there costs seconds and can start background builds.

    Args:
        name: import name, such as ``flashinfer``.
    """
    package = DISTRIBUTIONS.get(name, name)
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        return f"{name} is not installed (distribution {package})"
    if (old := _too_old(name, package)) is not None:
        return old
    if has_real_gpu():
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"{name} failed to import: {type(error).__name__}: {error}"
    return None


def _too_old(name: str, package: str) -> str | None:
    try:
        found, requirements = version(package), requires("phyai-engine") or []
    except PackageNotFoundError:
        return None
    for requirement in requirements:
        asked = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*>=\s*([\d.]+)", requirement)
        if asked and asked[1] == package and _numbers(found) < _numbers(asked[2]):
            return f"{name} is version {found}; rows need {package}>={asked[2]}"
    return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def library_available(name: str) -> bool:
    """Whether the library can be used; see `library_problem`."""
    return library_problem(name) is None


def reset_library_probes() -> None:
    """Forgets what was probed, for tests and after installing a library."""
    library_problem.cache_clear()
