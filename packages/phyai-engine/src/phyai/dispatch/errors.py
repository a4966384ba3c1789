"""Errors of policies and of selection."""

from pathlib import Path


class PolicyError(ValueError):
    """A policy is malformed, contradicts itself or passes bad params.

    Attributes:
        source: file the policy came from, or an empty string.
        line: 1-based line in that file, or None.
        path: where in the document, such as ``rules[0].match``.
    """

    def __init__(
        self, message: str, *, source: str | Path = "", line: int | None = None, path: str = ""
    ) -> None:
        self.source: str = str(source)
        self.line = line
        self.path = path
        self.message = message
        where = f"{self.source}:{line}" if self.source and line else self.source
        where = where or (f"line {line}" if line else "")
        super().__init__(": ".join(part for part in (where, path, message) if part))


class NoKernelError(RuntimeError):
    """No row can serve a call; the text lists every row with the reason it was rejected."""


class FrozenChoiceError(RuntimeError):
    """A call site cannot be frozen, or a frozen choice no longer fits the facts."""
