"""Canonical spellings of dtypes and the did-you-mean helper of error messages."""

import difflib
from collections.abc import Iterable
from enum import Enum
from functools import lru_cache
from typing import Any

_DTYPE_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "float8": "fp8_e4m3",
    "fp8": "fp8_e4m3",
    "float8_e4m3": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e5m2": "fp8_e5m2",
    "float8_e5m2fnuz": "fp8_e5m2fnuz",
}


@lru_cache(maxsize=256)
def dtype_name(value: Any) -> str:
    """Returns the short name of a dtype, such as ``bf16`` for ``torch.bfloat16``.

    Args:
        value: a ``torch.dtype``, a string or an enum whose value is a string. Names without an
            alias pass through in lower case.
    """
    if isinstance(value, Enum):
        value = value.value
    text = str(value).strip().lower().removeprefix("torch.")
    return _DTYPE_ALIASES.get(text, text)


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the closest of ``known``, or an empty string."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def listing(names: Iterable[str]) -> str:
    """Returns the sorted names joined by commas, for error messages."""
    return ", ".join(sorted(names)) or "none"
