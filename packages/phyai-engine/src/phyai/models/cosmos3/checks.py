"""Checks of the numbers in requests."""

import math
from numbers import Integral, Real
from typing import Any

from phyai.processing.errors import ProcessingError


def check_count(name: str, value: Any, *, least: int = 1, step: int = 1, more: int = 0) -> int:
    """Returns a whole number of ``more`` + a multiple of ``step``, not below ``least``.

    Raises:
        ProcessingError: for anything else.
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    count = int(value) if whole else least - 1
    if count < least or (count - more) % step:
        kind = "integers" if step == 1 else f"multiples of {step}"
        plus = f"{more} + " if more else ""
        raise ProcessingError(f"{name} is {value!r}; allowed: {plus}{kind}, at least {least}")
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
