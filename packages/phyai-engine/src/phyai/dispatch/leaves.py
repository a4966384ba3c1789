"""The tests of one fact: comparisons, membership, architectures, sets and libraries."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phyai.dispatch.arch import Arch, arch_at_least
from phyai.dispatch.facts import MISSING, Facts
from phyai.dispatch.library import library_problem
from phyai.dispatch.outcome import Outcome, Truth
from phyai.dispatch.predicate import Leaf, Predicate

ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _show(value: Any) -> str:
    return "none" if value is None else repr(value) if isinstance(value, str) else str(value)


@dataclass(frozen=True)
class Compare(Leaf):
    """``path <op> literal``; the order operators need a number."""

    path: str
    op: str
    value: Any

    def check(self, value: Any) -> str | None:
        """Compares a supplied value."""
        if self.op == "==":
            passed = value is not None and value == self.value
        elif self.op == "!=":
            passed = value != self.value
        elif value is None:
            return "is unknown"
        else:
            passed = ORDER[self.op](value, self.value)
        return None if passed else f"is {_show(value)}"

    def render(self) -> str:
        """Returns ``path op literal``."""
        return f"{self.path} {self.op} {_show(self.value)}"


@dataclass(frozen=True)
class Same(Predicate):
    """Two paths have the same value."""

    left: str
    right: str

    def eval(self, facts: Facts) -> Outcome:
        """Compares the two values."""
        values = []
        for path in (self.left, self.right):
            value = facts.get(path)
            if value is MISSING:
                if facts.optional(path):
                    return Outcome(Truth.VACUOUS, skipped=(path,))
                return Outcome(Truth.ABSENT, f"{self.render()}: {path} was not provided")
            values.append(value)
        if values[0] == values[1]:
            return Outcome(Truth.TRUE)
        shown = " and ".join(_show(value) for value in values)
        return Outcome(Truth.FALSE, f"{self.render()}: they are {shown}")

    def render(self) -> str:
        """Returns ``left == right``."""
        return f"{self.left} == {self.right}"

    def facts_used(self) -> frozenset[str]:
        """Reads both paths."""
        return frozenset({self.left, self.right})

    def restrict(self, known: Facts) -> Predicate:
        """Decides when both are known; substitutes when one is."""
        left, right = known.get(self.left), known.get(self.right)
        if left is MISSING and right is MISSING:
            return self
        if left is MISSING:
            return Compare(self.left, "==", right)
        if right is MISSING:
            return Compare(self.right, "==", left)
        return Compare(self.left, "==", right).restrict(known)


@dataclass(frozen=True)
class OneOf(Leaf):
    """The value is one of the listed ones."""

    path: str
    values: tuple[Any, ...]

    def check(self, value: Any) -> str | None:
        """Looks the value up."""
        return None if value in self.values else f"is {_show(value)}"

    def render(self) -> str:
        """Returns ``path in {...}``, sorted."""
        ordered = sorted(
            self.values, key=lambda value: (str(type(value)), 0 if value is None else value)
        )
        return f"{self.path} in {{{', '.join(_show(value) for value in ordered)}}}"


@dataclass(frozen=True)
class AtLeast(Leaf):
    """The architecture is of the bound's series and not older."""

    bound: str
    path: str = "device.arch"

    def check(self, value: Any) -> str | None:
        """Compares architectures."""
        if value is None:
            return "is unknown"
        return None if arch_at_least(value, self.bound) else f"is {_show(value)}"

    def render(self) -> str:
        """Returns ``path >= bound``."""
        return f"{self.path} >= {self.bound}"


@dataclass(frozen=True)
class FamilyIn(Leaf):
    """The architecture belongs to one of the families, such as ``sm9``."""

    families: tuple[str, ...]
    path: str = "device.arch"

    def check(self, value: Any) -> str | None:
        """Looks the family up."""
        if value is None:
            return "is unknown"
        return None if Arch.parse(value).family in self.families else f"is {_show(value)}"

    def render(self) -> str:
        """Returns ``family(path) in {...}``."""
        return f"family({self.path}) in {{{', '.join(sorted(self.families))}}}"


@dataclass(frozen=True)
class Modulus(Leaf):
    """The value leaves the given remainder."""

    path: str
    modulus: int
    remainder: int = 0

    def check(self, value: Any) -> str | None:
        """Divides the value."""
        if value is None:
            return "is unknown"
        return None if value % self.modulus == self.remainder else f"is {value}"

    def render(self) -> str:
        """Returns ``path % modulus == remainder``."""
        return f"{self.path} % {self.modulus} == {self.remainder}"


@dataclass(frozen=True)
class IsNone(Leaf):
    """The value is known to be absent."""

    path: str

    def check(self, value: Any) -> str | None:
        """Checks for None."""
        return None if value is None else f"is {_show(value)}"

    def render(self) -> str:
        """Returns ``path is none``."""
        return f"{self.path} is none"


@dataclass(frozen=True)
class IsSet(Leaf):
    """The value is supplied and not None."""

    path: str

    def check(self, value: Any) -> str | None:
        """Checks against None."""
        return None if value is not None else "is none"

    def render(self) -> str:
        """Returns ``path is set``."""
        return f"{self.path} is set"


@dataclass(frozen=True)
class Intersects(Leaf):
    """The set of strings holds at least one of the listed ones."""

    path: str
    values: frozenset[str]

    def check(self, value: Any) -> str | None:
        """Intersects the sets."""
        if value is not None and self.values & value:
            return None
        return f"is {sorted(value) if value else 'empty'}"

    def render(self) -> str:
        """Returns ``path has any of {...}``."""
        return f"{self.path} has any of {{{', '.join(sorted(self.values))}}}"


@dataclass(frozen=True)
class HasLibrary(Leaf):
    """The library can be used."""

    name: str

    @property
    def path(self) -> str:  # type: ignore[override]
        """``lib.<name>``."""
        return f"lib.{self.name}"

    def check(self, value: Any) -> str | None:
        """Reports what is wrong with the library."""
        return None if value else library_problem(self.name) or "is unavailable"

    def render(self) -> str:
        """Returns ``lib.<name>``."""
        return self.path
