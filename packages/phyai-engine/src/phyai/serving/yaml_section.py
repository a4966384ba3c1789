"""Typed reading of YAML maps: every error names the file, the line and the key."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phyai.dispatch.policy_yaml import Document, Path_


class Section:
    """One map of a document, read key by key.

    Args:
        document: The file.
        path: Where the map stands.
        allowed: Its keys.

    Raises:
        PolicyError: No map stands there, or it has another key.
    """

    def __init__(self, document: Document, path: Path_, allowed: Sequence[str]) -> None:
        self.document = document
        self.path = path
        value = document.value(path) if path else document.data
        if not isinstance(value, dict):
            document.fail(path, f"expected a map with the keys {', '.join(allowed)}")
        for key in value:
            if key not in allowed:
                document.fail((*path, key), f"unknown key {key!r}; allowed: {', '.join(allowed)}")
        self._values: dict[str, Any] = value

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def fail(self, key: str, message: str) -> Any:
        """Raise an error about one key."""
        self.document.fail((*self.path, key), message)

    def text(self, key: str, default: str | None = None) -> str | None:
        """Return a string."""
        value = self._values.get(key)
        if value is None:
            return default
        return value if isinstance(value, str) else self.fail(key, f"{value!r} is no string")

    def needed(self, key: str) -> str:
        """Return a string that must be there."""
        value = self.text(key)
        return self.fail(key, f"{key!r} is missing") if value is None else value

    def file(self, key: str) -> Path | None:
        """Return a path; relative ones start at the folder of the document."""
        value = self.text(key)
        if value is None:
            return None
        folder = Path(self.document.source).parent if self.document.source else Path()
        return folder / Path(value).expanduser()

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self._values.get(key, default)
        return (
            value if isinstance(value, bool) else self.fail(key, f"{value!r} is no true or false")
        )

    def integer(self, key: str, default: int | None, low: int, high: int) -> Any:
        """Return an integer in a range."""
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(key, f"{value!r} is no integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None, low: float = -1e9, high: float = 1e9) -> Any:
        """Return a number in a range."""
        value = self._values.get(key)
        if value is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            self.fail(key, f"{value!r} is no number from {low:g} to {high:g}")
        return float(value)

    def numbers(self, key: str, size: int | None, default: Any) -> Any:
        """Return a number, or a tuple of `size` numbers (any length when None)."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, list):
            return self.number(key, None) if size is not None else self.fail(key, "expected a list")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int | float):
                self.fail(key, f"{item!r} is no number")
        if size is not None and len(value) != size:
            self.fail(key, f"expected one number or {size} numbers, got {len(value)}")
        return tuple(float(item) for item in value)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        value = self._values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.fail(key, "expected a list of strings")
        return tuple(value)

    def strings(self, key: str) -> dict[str, str]:
        """Return a map of strings to strings."""
        value = self._values.get(key) or {}
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            self.fail(key, "expected a map of names to names")
        return dict(value)

    def items(self, key: str, allowed: Sequence[str]) -> "list[Section]":
        """Return the maps of a list."""
        value = self._values.get(key) or []
        if not isinstance(value, list):
            self.fail(key, "expected a list of maps")
        return [
            Section(self.document, (*self.path, key, index), allowed) for index in range(len(value))
        ]
