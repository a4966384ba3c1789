"""Reading JSON strictly: every wrong type or missing key names its file and key."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phyai.processing.errors import ProcessingError

_NAMES = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
}
_MISSING = object()


@dataclass(frozen=True)
class JsonObject:
    """An object of a JSON file together with the place it was read from.

    Attributes:
        values: The object's members.
        file: The file, for messages.
        path: Keys from the file's root to this object, for messages.
    """

    values: Mapping[str, Any]
    file: Path
    path: str = ""

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def where(self, key: str) -> str:
        """Names a member for messages: file and dotted key."""
        return f"{self.file}: {self.path + '.' if self.path else ''}{key}"

    def get(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        """Returns a member of the given JSON type.

        Args:
            key: The member.
            kind: dict, list, str, bool, int or float; float takes integers too.
            default: Returned when the member is absent or null; without it that is an error.

        Raises:
            ProcessingError: The member is absent without a default, or has another type.
        """
        value = self.values.get(key)
        if value is None:
            if default is not _MISSING:
                return default
            found = ", ".join(sorted(self.values)) or "nothing"
            raise ProcessingError(f"{self.where(key)} is missing; found: {found}")
        check_type(value, kind, self.where(key))
        return value

    def child(self, key: str, *, optional: bool = False) -> "JsonObject":
        """Returns an object member; an absent optional one reads as empty."""
        values = self.get(key, dict, {}) if optional else self.get(key, dict)
        return JsonObject(values, self.file, f"{self.path}.{key}" if self.path else key)

    def strings(self, key: str, default: Sequence[str] | None = None) -> tuple[str, ...] | None:
        """Returns an array of strings, or the default when it is absent or null."""
        values = self.get(key, list, None)
        if values is None:
            return None if default is None else tuple(default)
        for index, value in enumerate(values):
            check_type(value, str, self.where(f"{key}[{index}]"))
        return tuple(values)


def check_type(value: Any, kind: type, where: str) -> None:
    """Raises ProcessingError unless `value` has the JSON type `kind`."""
    kinds = (int, float) if kind is float else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
        raise ProcessingError(
            f"{where} must be {_NAMES[kind]}, found {type(value).__name__} {value!r:.60}"
        )


def read_json(path: Path) -> JsonObject:
    """Reads a file whose root is an object.

    Raises:
        ProcessingError: The file is absent, is not JSON, or its root is something else.
    """
    try:
        root = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProcessingError(f"{path} can not be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ProcessingError(f"{path} is not valid JSON: {error}") from error
    check_type(root, dict, f"{path}: the root")
    return JsonObject(root, path)
