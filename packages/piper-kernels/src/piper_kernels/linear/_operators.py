"""Definition of operators without the layers of ``torch.library.custom_op``.

Those cost the host 6 µs a call.
"""

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("piper_kernels", "FRAGMENT")


def operator(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function on all devices and returns what calls it.

    Args:
        name: Name in ``torch.ops.piper_kernels``. The function mutates nothing and returns new
            tensors; its fake is registered with ``fake_of``.
    """

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        schema = torch.library.infer_schema(function, mutates_args=())
        LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.piper_kernels, name).default

    return define


def fake_of(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers the fake of an operator of ``operator``."""
    return torch.library.register_fake(f"piper_kernels::{name}", lib=LIBRARY)
