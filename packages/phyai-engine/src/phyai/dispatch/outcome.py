"""Four-valued results of predicates."""

from dataclasses import dataclass
from enum import Enum


class Truth(Enum):
    """Result of a predicate."""

    TRUE = "true"
    FALSE = "false"
    VACUOUS = "vacuous"
    ABSENT = "absent"

    @property
    def accepts(self) -> bool:
        """Whether this result lets a call pass."""
        return self in {Truth.TRUE, Truth.VACUOUS}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one evaluation.

    Attributes:
        truth: the four-valued result.
        reason: why it does not accept; empty otherwise.
        skipped: optional paths that were not supplied.
    """

    truth: Truth
    reason: str = ""
    skipped: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the call passes."""
        return self.truth.accepts
