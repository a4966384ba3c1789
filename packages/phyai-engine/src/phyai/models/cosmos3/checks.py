"""Checks of the values in requests."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from phyai.processing.errors import ProcessingError

_TEXTS = ("prompt", "negative_prompt", "domain", "tier", "view_description")
_FLAGS = ("metadata", "sound", "decode_video")
_OPTIONAL = ("tier", "exteriors")
_MOST = 65_536


def check_kinds(request: object, *clips: str) -> None:
    """Checks that texts, flags and clips of a request are such; a planner relies on it.

    Args:
        request: one of the requests.
        clips: its fields that hold several pictures.

    Raises:
        ProcessingError: for a field of another kind.
    """

    def given(names: Sequence[str]) -> list[tuple[str, Any]]:
        found = [(name, getattr(request, name)) for name in names if hasattr(request, name)]
        return [item for item in found if not (item[1] is None and item[0] in _OPTIONAL)]

    for name, value in given(_TEXTS):
        if not isinstance(value, str):
            raise ProcessingError(f"{name} is {value!r}; it must be a string")
    for name, value in given(_FLAGS):
        if not isinstance(value, bool):
            raise ProcessingError(f"{name} is {value!r}; allowed: True, False")
    for name, value in given(clips):
        lists = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        if not (lists or (isinstance(value, np.ndarray) and value.ndim)):
            raise ProcessingError(
                f"{name!r} is {type(value).__name__}; pass a list of pictures, or an array that "
                "stacks them along a leading axis"
            )


def check_count(name: str, value: Any, *, least: int = 1, step: int = 1, more: int = 0) -> int:
    """Returns a whole number of ``more`` + a multiple of ``step`` from ``least`` to 65,536.

    Raises:
        ProcessingError: for anything else.
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    count = int(value) if whole else least - 1
    if not least <= count <= _MOST or (count - more) % step:
        kind = "integers" if step == 1 else f"multiples of {step}"
        plus = f"{more} + " if more else ""
        raise ProcessingError(
            f"{name} is {value!r}; allowed: {plus}{kind}, at least {least} and at most {_MOST}"
        )
    return count


def check_rate(name: str, value: Any) -> float:
    """Returns a finite positive number.

    Raises:
        ProcessingError: for anything else.
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    rate = float(value) if number else math.nan
    if not (math.isfinite(rate) and rate > 0):
        raise ProcessingError(f"{name} is {value!r}; allowed: positive numbers")
    return rate


def check_array(name: str, value: Any, shape: Sequence[int | None]) -> np.ndarray:
    """Returns numbers of a shape in fp64; a single number may come as a vector of one.

    Args:
        name: argument, for messages.
        value: what was given.
        shape: sizes, None for any.

    Raises:
        ProcessingError: for a missing value, another shape or dtype, or numbers that are not finite
            in fp32.
    """
    sizes = "x".join("n" if size is None else str(size) for size in shape)
    expected = f"expected {sizes} finite numbers" if sizes else "expected a finite number"
    if value is None:
        raise ProcessingError(f"{name!r} is missing; {expected}")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ProcessingError(f"{name!r} is no array ({error}); {expected}") from error
    if shape == () and array.shape == (1,):
        array = array[0]
    fits = array.ndim == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype.kind not in "fiu":
        raise ProcessingError(
            f"{name!r} has shape {array.shape} and dtype {array.dtype}; {expected}"
        )
    numbers = np.asarray(array, dtype=np.float64)
    if not (np.abs(numbers) <= np.finfo(np.float32).max).all():
        raise ProcessingError(f"{name!r} has numbers that are not finite; {expected}")
    return numbers
