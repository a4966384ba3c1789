"""Generic work on weight wrappers through torch's ``__tensor_flatten__`` protocol."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def rebuild[W](weight: W, function: Callable[[Tensor], Tensor], **attributes: object) -> W:
    """Return a new wrapper over ``function`` of every inner tensor.

    Args:
        weight: A weight with torch's ``__tensor_flatten__`` protocol.
        function: Applied to each inner tensor that is present.
        attributes: Metadata that differs from the one of ``weight``.
    """
    return rebuild_named(weight, lambda _, inner: function(inner), **attributes)


def rebuild_named[W](
    weight: W, function: Callable[[str, Tensor], Tensor], **attributes: object
) -> W:
    """Return a new wrapper over ``function(name, inner tensor)``, like ``rebuild``."""
    source: Any = weight
    names, metadata = source.__tensor_flatten__()
    inner = {name: function(name, getattr(source, name)) for name in names}
    return type(source).__tensor_unflatten__(inner, metadata | attributes, None, None)


def describe_metadata(weight: Any) -> str:
    """Return a string that is equal for weights of equal metadata, whatever their contents."""
    names, metadata = weight.__tensor_flatten__()
    inner = [
        (name, tuple(getattr(weight, name).shape), tuple(getattr(weight, name).stride()))
        for name in names
    ]
    return repr(
        (
            type(weight).__qualname__,
            tuple(weight.shape),
            tuple(weight.stride()),
            str(weight.device),
            sorted((name, str(value)) for name, value in metadata.items()),
            inner,
        )
    )


def cache_bypass(what: str) -> Exception:
    """Returns the exception that keeps a graph out of AOTAutograd's disk cache."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    return BypassAOTAutogradCache(f"a graph of a {what} is not cached on disk")
