"""Functions that build conditions: what rows and policies are written in."""

from typing import Any

from phyai.dispatch.arch import Arch
from phyai.dispatch.facts import FactKind, default_kind, normalize
from phyai.dispatch.leaves import (
    ORDER,
    AtLeast,
    Compare,
    FamilyIn,
    HasLibrary,
    Intersects,
    IsNone,
    IsSet,
    Modulus,
    OneOf,
    Same,
)
from phyai.dispatch.predicate import Predicate


def _normalized(path: str, value: Any, kind: FactKind | None) -> Any:
    return normalize(kind or default_kind(path) or FactKind.ANY, value)


def eq(path: str, value: Any, kind: FactKind | None = None) -> Predicate:
    """``path == value``; None asks for known absence."""
    if value is None:
        return IsNone(path)
    return Compare(path, "==", _normalized(path, value, kind))


def ne(path: str, value: Any, kind: FactKind | None = None) -> Predicate:
    """``path != value``; None asks for presence."""
    if value is None:
        return IsSet(path)
    return Compare(path, "!=", _normalized(path, value, kind))


def compare(path: str, op: str, value: int) -> Predicate:
    """``path <op> value`` for an integer fact; op is one of ``< <= > >=``."""
    if op not in ORDER:
        raise ValueError(f"operator {op!r} is unknown; allowed: {', '.join(ORDER)}")
    return Compare(path, op, int(value))


def one_of(path: str, *values: Any, kind: FactKind | None = None) -> Predicate:
    """The value of ``path`` is one of ``values``."""
    return OneOf(path, tuple(_normalized(path, value, kind) for value in values))


def at_least(bound: str) -> Predicate:
    """``device.arch`` is of the bound's series and not older."""
    arch = Arch.parse(bound)
    if not arch.ordered:
        raise ValueError(f"architectures of series {arch.series!r} have no order; list them")
    return AtLeast(arch.name)


def family_in(*families: str) -> Predicate:
    """``device.arch`` belongs to one of the families."""
    return FamilyIn(tuple(family.lower() for family in families))


def divisible(path: str, modulus: int, remainder: int = 0) -> Predicate:
    """``path % modulus == remainder``.

    Raises:
        ValueError: unless ``modulus > 0`` and ``0 <= remainder < modulus``.
    """
    if modulus <= 0 or not 0 <= remainder < modulus:
        raise ValueError(f"modulus {modulus} and remainder {remainder} are out of range")
    return Modulus(path, modulus, remainder)


def is_none(path: str) -> Predicate:
    """The fact is known to be absent."""
    return IsNone(path)


def is_set(path: str) -> Predicate:
    """The fact is supplied and not None."""
    return IsSet(path)


def has_any(path: str, *values: str) -> Predicate:
    """The set-valued fact holds one of ``values``."""
    return Intersects(path, frozenset(value.lower() for value in values))


def same(left: str, right: str) -> Predicate:
    """The two facts are equal."""
    return Same(left, right)


def lib(name: str) -> Predicate:
    """The library can be used in this process."""
    return HasLibrary(name)
