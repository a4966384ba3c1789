"""Units of a robot's actions to those of the model and back, by statistics of the data set.

Every kind is the affine map ``y = (x - offset) / scale``; the asinh kinds compress its tails by
``asinh``. With statistics ``low`` and ``high``: ``scale = (high - low) / 2``,
``offset = (high + low) / 2``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from phyai.processing.errors import ProcessingError


class Normalization(StrEnum):
    """Which statistics scale the actions."""

    MINMAX = "minmax"
    QUANTILE = "quantile"
    QUANTILE_ROT = "quantile_rot"
    MEANSTD = "meanstd"
    ASINH_MINMAX = "asinh_minmax"
    ASINH_QUANTILE = "asinh_quantile"
    ASINH_MEANSTD = "asinh_meanstd"


_STATISTICS = {
    Normalization.MINMAX: ("min", "max"),
    Normalization.QUANTILE: ("q01", "q99"),
    Normalization.QUANTILE_ROT: ("q01", "q99"),
    Normalization.MEANSTD: ("mean", "std"),
    Normalization.ASINH_MINMAX: ("min", "max"),
    Normalization.ASINH_QUANTILE: ("q01", "q99"),
    Normalization.ASINH_MEANSTD: ("mean", "std"),
}
_GLOBAL = "global_raw"
"""Where ``quantile_rot`` finds its statistics."""


@dataclass(frozen=True, eq=False)
class ActionNormalizer:
    """An exactly invertible map of action columns.

    Attributes:
        scale: fp64 [columns], not zero; a column without spread has scale 1.
        offset: fp64 [columns].
        asinh: whether the model's values are compressed by ``asinh``.
    """

    scale: np.ndarray
    offset: np.ndarray
    asinh: bool = False

    @classmethod
    def from_statistics(
        cls, kind: str | Normalization, statistics: Mapping[str, Any]
    ) -> "ActionNormalizer":
        """Builds the map of a kind.

        Args:
            kind: one of `Normalization`.
            statistics: vectors by name: ``min`` and ``max``, ``q01`` and ``q99`` (under
                ``global_raw`` for ``quantile_rot``), or ``mean`` and ``std``.

        Raises:
            ProcessingError: for an unknown kind, and for missing, infinite, unequal or reversed
                vectors.
        """
        try:
            kind = Normalization(kind)
        except ValueError:
            allowed = ", ".join(Normalization)
            raise ProcessingError(f"normalization is {kind!r}; allowed: {allowed}") from None
        if kind is Normalization.QUANTILE_ROT:
            inner = statistics.get(_GLOBAL)
            if not isinstance(inner, Mapping):
                raise ProcessingError(
                    f"normalization {kind!s} reads {_GLOBAL!r}, which is missing; found: "
                    f"{', '.join(sorted(statistics)) or 'nothing'}"
                )
            statistics = inner
        first, second = (_vector(kind, statistics, name) for name in _STATISTICS[kind])
        if first.shape != second.shape:
            raise ProcessingError(
                f"statistics of {kind!s} have {len(first)} and {len(second)} columns; "
                "they must be of one data set"
            )
        if "mean" in _STATISTICS[kind]:
            scale, offset = second, first
        else:
            scale, offset = (second - first) / 2, (second + first) / 2
        if (scale < 0).any():
            column = int(np.flatnonzero(scale < 0)[0])
            raise ProcessingError(
                f"statistics of {kind!s} are reversed in column {column}: {first[column]:g}, "
                f"{second[column]:g}; pass those of the data set"
            )
        return cls(np.where(scale == 0, 1.0, scale), offset, "asinh" in kind)

    @property
    def width(self) -> int:
        """Columns."""
        return len(self.scale)

    def normalize(self, actions: np.ndarray) -> np.ndarray:
        """Maps [..., columns] in units of the robot to fp32 units of the model."""
        values = (np.asarray(actions, dtype=np.float64) - self.offset) / self.scale
        return (np.arcsinh(values) if self.asinh else values).astype(np.float32)

    def restore(self, actions: np.ndarray) -> np.ndarray:
        """Maps [..., columns] of the model to fp32 units of the robot."""
        values = np.asarray(actions, dtype=np.float64)
        values = np.sinh(values) if self.asinh else values
        return (values * self.scale + self.offset).astype(np.float32)


def _vector(kind: Normalization, statistics: Mapping[str, Any], name: str) -> np.ndarray:
    if name not in statistics:
        raise ProcessingError(
            f"normalization {kind!s} needs {' and '.join(_STATISTICS[kind])}; {name!r} is missing, "
            f"found: {', '.join(sorted(statistics)) or 'nothing'}"
        )
    try:
        vector = np.asarray(statistics[name], dtype=np.float64)
    except (TypeError, ValueError):
        vector = np.empty((0, 0))
    if vector.ndim != 1 or not len(vector) or not np.isfinite(vector).all():
        raise ProcessingError(
            f"statistic {name!r} of {kind!s} must be a vector of finite numbers, got "
            f"{statistics[name]!r:.80}"
        )
    return vector
