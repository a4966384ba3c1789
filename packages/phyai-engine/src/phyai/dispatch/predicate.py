"""Predicates over facts: evaluation with reasons, canonical text, partial evaluation.

A predicate has four outcomes. Besides true and false it is *vacuous* when it asks for an optional
fact that was not supplied, and *absent* when it asks for a required one. Negation keeps vacuous
and absent as they are, so ``none_of`` over a missing optional fact does not reject a call. A
vacuous result accepts, an absent one rejects.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from phyai.dispatch.facts import MISSING, Facts
from phyai.dispatch.outcome import Outcome, Truth


class ParensError(TypeError):
    """A predicate was used as a boolean, for example with ``and`` or a chained comparison."""


_TRUE = Outcome(Truth.TRUE)


class Predicate:
    """Base of all predicates. Combine them with ``&``, ``|`` and ``~``."""

    def eval(self, facts: Facts) -> Outcome:
        """Evaluates against the facts of one call."""
        raise NotImplementedError

    def render(self) -> str:
        """Returns the canonical text; equal predicates have equal text."""
        raise NotImplementedError

    def facts_used(self) -> frozenset[str]:
        """Returns every path this predicate may read."""
        raise NotImplementedError

    def restrict(self, known: Facts) -> "Predicate":
        """Replaces the parts that the known facts decide by constants."""
        raise NotImplementedError

    def __and__(self, other: "Predicate") -> "Predicate":
        return And((self, other))

    def __or__(self, other: "Predicate") -> "Predicate":
        return Or((self, other))

    def __invert__(self) -> "Predicate":
        return Not(self)

    def __bool__(self) -> bool:
        raise ParensError(
            f"predicate ({self.render()}) has no truth value; combine predicates with &, | and ~, "
            "in parentheses, and call eval(facts)"
        )


@dataclass(frozen=True)
class Const(Predicate):
    """A decided predicate."""

    value: bool
    reason: str = ""

    def eval(self, facts: Facts) -> Outcome:  # noqa: ARG002
        """Returns the constant."""
        return _TRUE if self.value else Outcome(Truth.FALSE, self.reason or "is never satisfied")

    def render(self) -> str:
        """Returns ``always`` or ``never``."""
        return "always" if self.value else "never"

    def facts_used(self) -> frozenset[str]:
        """Reads nothing."""
        return frozenset()

    def restrict(self, known: Facts) -> Predicate:  # noqa: ARG002
        """Stays as it is."""
        return self


ALWAYS = Const(True)


class Leaf(Predicate):
    """A test of one path's value."""

    path: str

    def check(self, value: Any) -> str | None:
        """Returns why a supplied value fails, or None if it passes."""
        raise NotImplementedError

    def eval(self, facts: Facts) -> Outcome:
        """Evaluates the test."""
        value = facts.get(self.path)
        if value is MISSING:
            if facts.optional(self.path):
                return Outcome(Truth.VACUOUS, skipped=(self.path,))
            return Outcome(Truth.ABSENT, f"{self.render()}: {self.path} was not provided")
        problem = self.check(value)
        if problem is None:
            return _TRUE
        return Outcome(Truth.FALSE, f"{self.render()}: {problem}")

    def facts_used(self) -> frozenset[str]:
        """Reads its path."""
        return frozenset({self.path})

    def restrict(self, known: Facts) -> Predicate:
        """Becomes a constant when the path is known."""
        if known.get(self.path) is MISSING:
            return self
        outcome = self.eval(known)
        return Const(outcome.ok, outcome.reason)


def _merge(outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for outcome in outcomes for path in outcome.skipped))


@dataclass(frozen=True)
class And(Predicate):
    """All parts hold; reports the first that fails, in written order."""

    parts: tuple[Predicate, ...]

    def eval(self, facts: Facts) -> Outcome:
        """Evaluates the parts in order up to the first that is false."""
        seen: list[Outcome] = []
        absent: Outcome | None = None
        for part in self.parts:
            outcome = part.eval(facts)
            if outcome.truth is Truth.FALSE:
                return Outcome(Truth.FALSE, absent.reason if absent else outcome.reason)
            if outcome.truth is Truth.ABSENT and absent is None:
                absent = outcome
            seen.append(outcome)
        if absent is not None:
            return absent
        if any(outcome.truth is Truth.VACUOUS for outcome in seen):
            return Outcome(Truth.VACUOUS, skipped=_merge(seen))
        return Outcome(Truth.TRUE, skipped=_merge(seen))

    def render(self) -> str:
        """Joins the parts with ``and``."""
        return " and ".join(_wrap(part, Or) for part in self.parts) or "always"

    def facts_used(self) -> frozenset[str]:
        """Reads what the parts read."""
        return frozenset().union(*(part.facts_used() for part in self.parts))

    def restrict(self, known: Facts) -> Predicate:
        """Drops decided parts; one false part decides the whole."""
        rest: list[Predicate] = []
        for part in self.parts:
            reduced = part.restrict(known)
            if isinstance(reduced, Const):
                if not reduced.value:
                    return reduced
            else:
                rest.append(reduced)
        return And(tuple(rest)) if len(rest) > 1 else rest[0] if rest else ALWAYS


@dataclass(frozen=True)
class Or(Predicate):
    """At least one part holds; reports every failure."""

    parts: tuple[Predicate, ...]

    def eval(self, facts: Facts) -> Outcome:
        """Evaluates the parts in order up to the first that is true."""
        seen: list[Outcome] = []
        for part in self.parts:
            outcome = part.eval(facts)
            if outcome.truth is Truth.TRUE:
                return outcome
            seen.append(outcome)
        if any(outcome.truth is Truth.VACUOUS for outcome in seen):
            return Outcome(Truth.VACUOUS, skipped=_merge(seen))
        reason = "; ".join(dict.fromkeys(outcome.reason for outcome in seen))
        absent = any(outcome.truth is Truth.ABSENT for outcome in seen)
        return Outcome(Truth.ABSENT if absent else Truth.FALSE, reason)

    def render(self) -> str:
        """Joins the parts with ``or``."""
        return " or ".join(_wrap(part, And) for part in self.parts) or "never"

    def facts_used(self) -> frozenset[str]:
        """Reads what the parts read."""
        return frozenset().union(*(part.facts_used() for part in self.parts))

    def restrict(self, known: Facts) -> Predicate:
        """Drops decided parts; one true part decides the whole."""
        rest: list[Predicate] = []
        reasons: list[str] = []
        for part in self.parts:
            reduced = part.restrict(known)
            if not isinstance(reduced, Const):
                rest.append(reduced)
            elif reduced.value:
                return ALWAYS
            else:
                reasons.append(reduced.reason)
        if not rest:
            return Const(False, "; ".join(reasons))
        return Or(tuple(rest)) if len(rest) > 1 else rest[0]


@dataclass(frozen=True)
class Not(Predicate):
    """The part does not hold."""

    part: Predicate

    def eval(self, facts: Facts) -> Outcome:
        """Swaps true and false; keeps vacuous and absent."""
        outcome = self.part.eval(facts)
        if outcome.truth is Truth.FALSE:
            return _TRUE
        if outcome.truth is Truth.TRUE:
            return Outcome(Truth.FALSE, f"{self.render()}: the excluded case holds")
        return outcome

    def render(self) -> str:
        """Prefixes ``not``."""
        return f"not ({self.part.render()})"

    def facts_used(self) -> frozenset[str]:
        """Reads what the part reads."""
        return self.part.facts_used()

    def restrict(self, known: Facts) -> Predicate:
        """Inverts a decided part."""
        reduced = self.part.restrict(known)
        if isinstance(reduced, Const):
            return Const(not reduced.value, f"{self.render()}: the excluded case holds")
        return Not(reduced)


def _wrap(part: Predicate, kind: type[Predicate]) -> str:
    return f"({part.render()})" if isinstance(part, kind) else part.render()


def all_of(*parts: Predicate) -> Predicate:
    """Returns the conjunction, flattening nested ones."""
    flat: list[Predicate] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, And) else [part])
    return flat[0] if len(flat) == 1 else And(tuple(flat))


def any_of(*parts: Predicate) -> Predicate:
    """Returns the disjunction."""
    return parts[0] if len(parts) == 1 else Or(parts)


def none_of(*parts: Predicate) -> Predicate:
    """Returns the negation of the disjunction."""
    return Not(any_of(*parts))


def implies(condition: Predicate, then: Predicate) -> Predicate:
    """Returns ``not condition or then``."""
    return Or((Not(condition), then))
