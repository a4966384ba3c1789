"""Names of GPU architectures: ``sm90`` and ``gfx942``, their order and their families."""

import re
from dataclasses import dataclass
from functools import lru_cache

_PATTERN = re.compile(r"([a-z]+)([0-9][0-9a-f]*)([a-z]?)")
_SM_MAJORS = range(5, 20)

PRODUCT_ARCHS = {
    "a100": "sm80",
    "a800": "sm80",
    "l40": "sm89",
    "l40s": "sm89",
    "rtx4090": "sm89",
    "h100": "sm90",
    "h200": "sm90",
    "h800": "sm90",
    "h20": "sm90",
    "gh200": "sm90",
    "b100": "sm100",
    "b200": "sm100",
    "gb200": "sm100",
    "b300": "sm103",
    "gb300": "sm103",
    "orin": "sm87",
    "thor": "sm110",
    "rtx5090": "sm120",
    "rtxpro6000": "sm120",
    "gb10": "sm121",
    "dgx-spark": "sm121",
    "mi250": "gfx90a",
    "mi300": "gfx942",
    "mi300x": "gfx942",
    "mi325x": "gfx942",
    "mi355x": "gfx950",
}


@dataclass(frozen=True, slots=True)
class Arch:
    """One GPU architecture.

    Attributes:
        name: lower-case name, such as ``sm90``.
        series: ``sm`` (NVIDIA) or ``gfx`` (AMD).
        major: generation number; for ``gfx`` its text, such as ``9``.
        minor: last digit for ``sm``, second last character for ``gfx``.
    """

    name: str
    series: str
    major: str
    minor: str

    @classmethod
    def parse(cls, text: str) -> "Arch":
        """Parses ``sm90`` or ``gfx942``.

        Raises:
            ValueError: if the text has no series, is only a generation (``sm9``), names a product
                or an implausible generation.
        """
        return _parse(str(text).strip().lower())

    @property
    def family(self) -> str:
        """Series and major, such as ``sm9`` for ``sm90``."""
        return self.series + self.major

    @property
    def ordered(self) -> bool:
        """Whether architectures of this series have a lower-bound order."""
        return self.series == "sm"


@lru_cache(maxsize=128)
def _parse(text: str) -> Arch:
    if text in PRODUCT_ARCHS or text.rstrip("0123456789") in PRODUCT_ARCHS:
        arch = PRODUCT_ARCHS.get(text, PRODUCT_ARCHS.get(text.rstrip("0123456789"), ""))
        raise ValueError(f"architecture {text!r} is a product name; write {arch!r}")
    if text.isdigit():
        raise ValueError(f"architecture {text!r} has no series; write 'sm{text}' or 'gfx{text}'")
    match = _PATTERN.fullmatch(text)
    if match is None or match[1] not in {"sm", "gfx"}:
        raise ValueError(f"architecture {text!r} is not of the form 'sm90' or 'gfx942'")
    series, digits = match[1], match[2] + match[3]
    if series == "gfx":
        if len(digits) < 3:
            raise ValueError(f"architecture {text!r} is not of the form 'gfx942'")
        return Arch(text, series, digits[:-2], digits[-2])
    if not digits.isdigit():
        # sm90a and sm100f name compile targets of the same architecture.
        digits = digits[:-1]
        if not digits.isdigit():
            raise ValueError(f"architecture {text!r} is not of the form 'sm90'")
    if len(digits) < 2:
        raise ValueError(f"architecture {text!r} is a generation without minor; write '{text}0'")
    if int(digits[:-1]) not in _SM_MAJORS:
        raise ValueError(f"architecture {text!r} has an implausible major {digits[:-1]}")
    return Arch(f"sm{digits}", series, digits[:-1], digits[-1])


def arch_at_least(arch: str, bound: str) -> bool:
    """Whether ``arch`` is of the series of ``bound`` and not older.

    Raises:
        ValueError: if ``bound`` is of a series without order (``gfx``).
    """
    low = Arch.parse(bound)
    if not low.ordered:
        raise ValueError(f"architectures of series {low.series!r} have no order; list them")
    have = Arch.parse(arch)
    if have.series != low.series:
        return False
    return (int(have.major), int(have.minor)) >= (int(low.major), int(low.minor))
