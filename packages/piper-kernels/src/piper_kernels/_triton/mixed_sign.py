"""Products of unsigned and signed 8-bit integers in Triton kernels, by a compiler-stage hook.

    with mixed_sign_dots():
        kernel[grid](...)  # a kernel with MARKER_ASM

The hook is installed while a marked kernel is launched or compiled and calls the hook that was
there before. Without it a marked kernel does not assemble. The name of the marker contains a
digest of the rewriting code, so the compiled kernel of another version is never found in a cache;
the hook takes part in the cache key besides, where this Triton asks it to.
"""

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import triton.language as tl
from triton import knobs

from piper_kernels._triton import mixed_sign_rewrite
from piper_kernels._triton.mixed_sign_rewrite import MixedSignError, rewrite_products

_SOURCES = (Path(__file__), Path(mixed_sign_rewrite.__file__))
DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:16]
MARKER = f"piper_mixed_sign_{DIGEST}"
# Constraints "=r,r" on NVIDIA GPUs and "=v,v" on AMD GPUs, one register at a time, pure.
MARKER_ASM = tl.constexpr(f"{MARKER} $0, $1;")

_TRANSPOSED = re.compile(r"amd_wmma<\{[^>]*?isTranspose(?:d)? = (true|false)")
_thread = threading.local()
_lock = threading.Lock()


class _StageHook:
    """What Triton calls: without arguments for the cache key, with them to change stages."""

    def __init__(self, previous: Callable[..., Any] | None) -> None:
        self.previous = previous
        self.active = True

    def __call__(self, *arguments: Any, **keywords: Any) -> tuple[str, str] | None:
        if not arguments and not keywords:
            return self._cache_key()
        if self.previous is not None:
            self.previous(*arguments, **keywords)
        if self.active:
            _rewrite_stage(keywords.get("stages", arguments[1] if len(arguments) > 1 else {}))
        return None

    def _cache_key(self) -> tuple[str, str]:
        """Return what distinguishes kernels; nothing for threads that compile no marked one."""
        key, digest = ("", "") if self.previous is None else self.previous()
        if self.active and getattr(_thread, "depth", 0):
            return f"{key}{MARKER}", f"{digest}{DIGEST}"
        return key, digest


def _rewrite_stage(stages: dict[str, Callable[..., Any]]) -> None:
    lower = stages["llir"]

    def lower_and_rewrite(source: object, metadata: object) -> object:
        # Lowering overwrites the module, so it is read before.
        before = str(source)
        result = lower(source, metadata)
        if MARKER not in before:
            return result
        transposed = set(_TRANSPOSED.findall(before))
        if len(transposed) > 1:
            raise MixedSignError("marked products have layouts of both orientations")
        return rewrite_products(str(result), MARKER, left_is_second=transposed == {"true"})

    stages["llir"] = lower_and_rewrite


class _Installation:
    """The hook that is installed and how many need it."""

    def __init__(self) -> None:
        self.users = 0
        self.hook: _StageHook | None = None


_installation = _Installation()


def install() -> None:
    """Install the hook until :func:`uninstall` was called as often; safe in several threads."""
    with _lock:
        _installation.users += 1
        if _installation.hook is None:
            _installation.hook = _StageHook(knobs.runtime.add_stages_inspection_hook)
            knobs.runtime.add_stages_inspection_hook = cast("Any", _installation.hook)


def uninstall() -> None:
    """Undo one :func:`install`; a hook that was chained on top in the meantime stays.

    Raises:
        RuntimeError: The hook is not installed.
    """
    with _lock:
        hook = _installation.hook
        if hook is None:
            raise RuntimeError("the mixed-sign hook is not installed; call install() before")
        _installation.users -= 1
        if _installation.users:
            return
        hook.active = False
        if knobs.runtime.add_stages_inspection_hook is hook:
            knobs.runtime.add_stages_inspection_hook = hook.previous
        _installation.hook = None


@contextmanager
def mixed_sign_dots() -> Iterator[None]:
    """Compile marked kernels that are launched or compiled by this thread inside."""
    install()
    _thread.depth = getattr(_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _thread.depth -= 1
        uninstall()
