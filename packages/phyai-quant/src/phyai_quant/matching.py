"""Module names: the one place that knows which spellings mean the same layer."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from phyai_quant.scheme import QuantConfigError

FUSED_LEGS: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Last component of a fused layer's name and of the checkpoint layers that make it up, in order."""

_FUSED_OF_LEG = {leg: fused for fused, legs in FUSED_LEGS.items() for leg in legs}
_WRAPPER_SUFFIXES = (".linear", ".base_layer")
_ROOT_SEGMENTS = ("model", "language_model")
_WILDCARDS = frozenset("*?[")


def check_name(name: str) -> str:
    """Returns ``name``; a name with an empty dotted segment is a QuantConfigError."""
    if not name or any(not segment for segment in name.split(".")):
        raise QuantConfigError(
            f"layer name {name!r} has an empty segment; pass the full dotted name, such as "
            "'model.layers.0.mlp.down_proj'"
        )
    return name


def fused_legs(prefix: str, legs: Sequence[str] | None = None) -> tuple[str, ...]:
    """Returns the names of the checkpoint layers behind ``prefix`` (itself when it is not fused).

    Args:
        prefix: Dotted name of a layer.
        legs: Last components of its legs, for fused layers that are not in `FUSED_LEGS`.
    """
    parent, _, last = prefix.rpartition(".")
    names = tuple(legs) if legs is not None else FUSED_LEGS.get(last, (last,))
    return tuple(f"{parent}.{name}" if parent else name for name in names)


def names_of_leg(leg: str, prefix: str) -> tuple[str, ...]:
    """Returns the names a config may use for ``leg`` of ``prefix``: the leg and the fused layer."""
    parent, _, last = leg.rpartition(".")
    fused = _FUSED_OF_LEG.get(last)
    names = [leg, prefix]
    if fused is not None:
        names.append(f"{parent}.{fused}" if parent else fused)
    return tuple(dict.fromkeys(names))


def strip_wrapper(name: str) -> str:
    """Returns ``name`` without the suffix of a wrapper module around the linear layer."""
    for suffix in _WRAPPER_SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def strip_root(name: str) -> str:
    """Returns ``name`` without leading ``model.`` and ``language_model.`` segments.

    In a shell pattern a root in front of a wildcard stays: ``model.*`` must not become ``*``.
    """
    segments = name.split(".")
    while len(segments) > 1 and segments[0] in _ROOT_SEGMENTS and not _WILDCARDS & set(segments[1]):
        segments = segments[1:]
    return ".".join(segments)


def name_matches(pattern: str, name: str) -> bool:
    """Tells whether ``pattern`` names the layer ``name``.

    Equal names match, also when they differ by a root segment or by a wrapper suffix; a pattern of
    one component matches every layer whose last component equals it.
    """
    wanted, seen = strip_wrapper(pattern), strip_wrapper(name)
    if wanted == seen or strip_root(wanted) == strip_root(seen):
        return True
    last_components = {text.rpartition(".")[2] for text in (name, seen)}
    return "." not in pattern and pattern in last_components


def glob_matches(pattern: str, name: str) -> bool:
    """Tells whether the shell pattern covers the whole name; ``*`` crosses dots."""
    wanted, seen = strip_wrapper(pattern), strip_wrapper(name)
    return fnmatchcase(seen, wanted) or fnmatchcase(strip_root(seen), strip_root(wanted))


def regex_matches(pattern: str, name: str) -> bool:
    """Tells whether the expression matches at the start of the name (its end is open)."""
    expression = compile_regex(pattern)
    return bool(expression.match(name) or expression.match(strip_wrapper(name)))


@lru_cache(maxsize=1024)
def compile_regex(pattern: str) -> re.Pattern[str]:
    """Compiles ``pattern``; an invalid one is a QuantConfigError."""
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise QuantConfigError(f"invalid regular expression {pattern!r}: {error}") from error


def class_matches(pattern: str, module_cls: type | str | None) -> bool:
    """Tells whether ``pattern`` is part of the name of the class or of one of its bases."""
    if module_cls is None:
        return False
    if isinstance(module_cls, str):
        return pattern in module_cls
    return any(pattern in base.__name__ for base in module_cls.__mro__ if base is not object)
