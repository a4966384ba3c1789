"""Which attention calls the Gluon kernels for Hopper execute. Needs neither Triton nor a device."""

from functools import cache

from piper_kernels._triton.runtime import NO_TRITON, triton_is_installed
from piper_kernels.attention._backends import AttentionRequest

_HOPPER = (9, 0)


@cache
def _has_kernels() -> bool:
    try:
        from piper_kernels.attention._sm90_kernels import launch  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


def hopper_support(request: AttentionRequest) -> tuple[bool, str]:
    """Return whether the Gluon kernels execute a request, or why not."""
    target = request.target
    if target is None or target.backend != "cuda" or target.capability != _HOPPER:
        found = "a CPU" if target is None else target.architecture
        return False, f"needs sm_90, got {found}"
    if not triton_is_installed():
        return False, NO_TRITON
    if not _has_kernels():
        return False, "Triton has no Gluon for Hopper; install Triton 3.6 or newer"
    return True, ""
