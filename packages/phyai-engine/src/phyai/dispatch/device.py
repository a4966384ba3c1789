"""Device profiles: real devices, and synthetic ones such as ``"nvidia:sm90"``."""

import sys
from functools import lru_cache
from typing import Any

from phyai.dispatch.arch import Arch
from phyai.dispatch.names import listing
from phyai.dispatch.types import DeviceProfile

_SERIES = {"nvidia": "sm", "amd": "gfx"}
VENDORS: tuple[str, ...] = ("cpu", "nvidia", "amd", "ascend", "cambricon", "intel", "apple")
_VENDOR_ALIASES = {
    "nv": "nvidia",
    "rocm": "amd",
    "hip": "amd",
    "npu": "ascend",
    "mlu": "cambricon",
    "xpu": "intel",
    "mps": "apple",
}
_TORCH_TYPES = {
    "npu": "ascend",
    "mlu": "cambricon",
    "xpu": "intel",
    "mps": "apple",
    "cpu": "cpu",
    "meta": "cpu",
}


def probe_device(device: Any = None) -> DeviceProfile:
    """Returns the profile of a device.

    Args:
        device: a profile, a ``torch.device``, a torch device string such as ``cuda:0``, a
            synthetic ``"vendor:arch"`` string such as ``"nvidia:sm90"``, or None for ``cuda`` if
            there is one, else ``cpu``.

    Raises:
        ValueError: for a string that names no device, with a hint.
    """
    if isinstance(device, DeviceProfile):
        return device
    return _probe(None if device is None else str(device).strip().lower())


@lru_cache(maxsize=16)
def _probe(text: str | None) -> DeviceProfile:
    if text is None:
        import torch

        text = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, rest = text.partition(":")
    if kind == "cuda" and (not rest or rest.isdigit()):
        return _probe_cuda(int(rest) if rest else None)
    if kind in _TORCH_TYPES and (not rest or rest.isdigit()):
        return DeviceProfile(_TORCH_TYPES[kind], None, int(rest) if rest else None)
    return _synthetic(text, kind, rest)


def _probe_cuda(index: int | None) -> DeviceProfile:
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            "device 'cuda' was asked for but torch sees no GPU; use 'cpu', or a synthetic "
            "profile such as 'nvidia:sm90' to explain a choice"
        )
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(index or 0).gcnArchName
        return DeviceProfile("amd", name.partition(":")[0].lower(), index)
    major, minor = torch.cuda.get_device_capability(index)
    return DeviceProfile("nvidia", f"sm{major}{minor}", index)


def _synthetic(text: str, vendor: str, arch: str) -> DeviceProfile:
    if vendor == "cuda" or vendor in _VENDOR_ALIASES:
        known = _VENDOR_ALIASES.get(vendor, "nvidia")
        raise ValueError(f"device {text!r}: unknown vendor {vendor!r}; did you mean {known!r}?")
    if vendor not in VENDORS:
        hint = "; write 'vendor:arch', such as 'nvidia:sm90'" if ":" not in text else ""
        raise ValueError(
            f"device {text!r}: unknown vendor {vendor!r}{hint}; allowed: {listing(VENDORS)}"
        )
    if not arch:
        if vendor in _SERIES:
            raise ValueError(f"device {text!r} lacks an architecture; write 'nvidia:sm90'")
        return DeviceProfile(vendor)
    series = _SERIES.get(vendor)
    if series is None:
        raise ValueError(f"device {text!r}: vendor {vendor!r} has no named architectures")
    try:
        parsed = Arch.parse(arch)
    except ValueError as error:
        raise ValueError(f"device {text!r}: {error}") from None
    if parsed.series != series:
        raise ValueError(
            f"device {text!r}: architectures of {vendor!r} start with {series!r}, got {arch!r}"
        )
    return DeviceProfile(vendor, parsed.name)


def has_real_gpu() -> bool:
    """Whether torch is loaded in this process and sees a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available()
