"""Whether an optional library is usable, asked once per process and only when a row needs it."""

import importlib
import importlib.util
from functools import lru_cache

from phyai.dispatch.device import has_real_gpu

DISTRIBUTIONS = {
    "flashinfer": "flashinfer-python",
    "humming": "humming-kernels",
    "piper_kernels": "piper-kernels",
    "torchao": "torchao",
    "triton": "triton",
}


@lru_cache(maxsize=64)
def library_problem(name: str) -> str | None:
    """Returns why the library cannot be used, or None if it can.

    On a host with a GPU the library is imported, and any exception counts as unusable. Without a
    GPU only its presence is checked, because importing a GPU library there costs seconds and can
    start background builds.

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
    if has_real_gpu():
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"{name} failed to import: {type(error).__name__}: {error}"
    return None


def library_available(name: str) -> bool:
    """Whether the library can be used; see `library_problem`."""
    return library_problem(name) is None


def reset_library_probes() -> None:
    """Forgets what was probed, for tests and after installing a library."""
    library_problem.cache_clear()
