"""Normalisation of states and actions by dataset statistics, exactly invertible.

Two systems are in use and differ in where the epsilon goes. With `w = high - low`:

| system | mode | forward | inverse |
| --- | --- | --- | --- |
| LeRobot | range modes | `2 (x - low) / w - 1`, eps where w is 0 | `(y + 1) w / 2 + low` |
| LeRobot | MEAN_STD | `(x - mean) / (std + eps)` | `y std + mean` |
| openpi | range modes | `2 (x - low) / (w + eps) - 1` | `(y + 1) / 2 (w + eps) + low` |
| openpi | MEAN_STD | `(x - mean) / (std + eps)` | `y (std + eps) + mean` |

LeRobot computes in float32, openpi in float64. Nothing is clipped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from phyai.processing.errors import ProcessingError


class NormSystem(StrEnum):
    """Whose formulas apply."""

    LEROBOT = "lerobot"
    OPENPI = "openpi"


class NormMode(StrEnum):
    """Which statistics scale the values; the names are those of LeRobot's files."""

    IDENTITY = "IDENTITY"
    MEAN_STD = "MEAN_STD"
    MIN_MAX = "MIN_MAX"
    QUANTILES = "QUANTILES"
    QUANTILE10 = "QUANTILE10"


STATISTICS: Mapping[NormMode, tuple[str, str]] = {
    NormMode.MEAN_STD: ("mean", "std"),
    NormMode.MIN_MAX: ("min", "max"),
    NormMode.QUANTILES: ("q01", "q99"),
    NormMode.QUANTILE10: ("q10", "q90"),
}


@dataclass(frozen=True)
class FeatureStats:
    """Statistics of one feature.

    Attributes:
        values: Statistic name (`mean`, `q01`, ...) to float64 `[dims]`.
        source: The file, for messages.
    """

    values: Mapping[str, np.ndarray]
    source: str


@dataclass(frozen=True)
class Normalizer:
    """Scales one feature forward and back.

    Attributes:
        feature: `state` or `action`, for messages.
        mode: Which statistics are used.
        system: Whose formulas are used.
        eps: Guard against division by zero.
        first: Mean or low end, `[dims]`; empty for `IDENTITY`.
        second: Standard deviation or high end, `[dims]`; empty for `IDENTITY`.
        source: Where the statistics came from.
    """

    feature: str
    mode: NormMode
    system: NormSystem
    eps: float
    first: np.ndarray
    second: np.ndarray
    source: str

    @property
    def width(self) -> int:
        """Columns that the statistics cover."""
        return self.first.shape[-1]

    def forward(self, values: np.ndarray) -> np.ndarray:
        """Robot units to model units.

        Args:
            values: `[..., dims]`; the first `dims` statistics are used.

        Returns:
            `[..., dims]`, float32 for LeRobot, float64 for openpi.

        Raises:
            ProcessingError: There are more columns than statistics.
        """
        x = np.asarray(values, dtype=self._dtype)
        if self.mode is NormMode.IDENTITY:
            return x
        dims = x.shape[-1]
        if dims > self.width:
            raise ProcessingError(
                f"the {self.feature} has {dims} columns but its statistics cover {self.width} "
                f"({self.source}); send the columns that the policy was trained on"
            )
        first, second = self._statistics(dims)
        if self.mode is NormMode.MEAN_STD:
            return (x - first) / (second + self.eps)
        return 2.0 * (x - first) / self._range(first, second) - 1.0

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """Model units to robot units; columns beyond the statistics pass through.

        Args:
            values: `[..., dims]`.

        Returns:
            A new array `[..., dims]`, float32 for LeRobot, float64 for openpi.
        """
        y = np.array(values, dtype=self._dtype)
        if self.mode is NormMode.IDENTITY:
            return y
        dims = min(self.width, y.shape[-1])
        first, second = self._statistics(dims)
        head = y[..., :dims]
        if self.mode is not NormMode.MEAN_STD:
            head = (head + 1.0) / 2.0 * self._range(first, second) + first
        elif self.system is NormSystem.LEROBOT:
            head = head * second + first
        else:
            head = head * (second + self.eps) + first
        y[..., :dims] = head
        return y

    def restore(self, values: np.ndarray) -> np.ndarray:
        """The way back of `inverse`, for values that it could have made.

        Where the statistics have no spread, `inverse` forgets the model's number; the one that the
        constant of the statistics has is taken.

        Args:
            values: `[..., dims]` in robot units; columns beyond the statistics pass through.

        Returns:
            A new array `[..., dims]`, float32 for LeRobot, float64 for openpi.
        """
        x = np.array(values, dtype=self._dtype)
        if self.mode is NormMode.IDENTITY:
            return x
        dims = min(self.width, x.shape[-1])
        first, second = self._statistics(dims)
        if self.mode is not NormMode.MEAN_STD:
            x[..., :dims] = self.forward(np.where(second == first, first, x[..., :dims]))
            return x
        spread = second if self.system is NormSystem.LEROBOT else second + self.eps
        known = np.where(second == 0, first, x[..., :dims])
        x[..., :dims] = (known - first) / np.where(second == 0, 1.0, spread).astype(self._dtype)
        return x

    @property
    def _dtype(self) -> type[np.floating]:
        return np.float32 if self.system is NormSystem.LEROBOT else np.float64

    def _statistics(self, dims: int) -> tuple[np.ndarray, np.ndarray]:
        return self.first[:dims].astype(self._dtype), self.second[:dims].astype(self._dtype)

    def _range(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        width = high - low
        if self.system is NormSystem.OPENPI:
            return width + self.eps
        return np.where(width == 0, np.asarray(self.eps, self._dtype), width)


def identity(feature: str, system: NormSystem, source: str) -> Normalizer:
    """Returns the normalizer that changes nothing."""
    nothing = np.empty(0)
    return Normalizer(feature, NormMode.IDENTITY, system, 0.0, nothing, nothing, source)


def build_normalizer(
    feature: str,
    mode: NormMode,
    stats: FeatureStats | None,
    *,
    system: NormSystem,
    eps: float,
    searched: str,
    allow_identity_norm: bool = False,
) -> Normalizer:
    """Builds the normalizer of a feature and refuses statistics that can not be meant.

    Args:
        feature: `state` or `action`.
        mode: Which statistics are used.
        stats: The feature's statistics, None when there are none.
        system: Whose formulas are used.
        eps: Guard against division by zero.
        searched: Where statistics were looked for, for the message.
        allow_identity_norm: Whether missing statistics mean "do not normalise".

    Returns:
        The normalizer.

    Raises:
        ProcessingError: Statistics are missing and that was not allowed, the mode's statistics are
            not among them, or they are infinite, NaN, reversed or negative.
    """
    if mode is NormMode.IDENTITY:
        return identity(feature, system, "mode IDENTITY")
    if stats is None:
        if allow_identity_norm:
            return identity(feature, system, "missing statistics, identity allowed")
        raise ProcessingError(
            f"no statistics for the {feature} (mode {mode}); looked in {searched}. Without them "
            "the robot would move by raw network outputs. Pass the statistics' path (openpi "
            "norm_stats.json, LeRobot meta/stats.json or a normalizer's .safetensors), use preset "
            "'raw' if you normalise yourself, or allow identity normalisation"
        )
    names = STATISTICS[mode]
    missing = [name for name in names if name not in stats.values]
    if missing:
        raise ProcessingError(
            f"{stats.source}: mode {mode} of the {feature} needs {' and '.join(names)}, missing "
            f"{' and '.join(missing)}; found: {', '.join(sorted(stats.values)) or 'nothing'}. "
            "Recompute the dataset statistics or pass the path of complete ones"
        )
    first, second = (stats.values[name] for name in names)
    _check(feature, mode, stats.source, first, second)
    return Normalizer(feature, mode, system, eps, first, second, stats.source)


def _check(
    feature: str, mode: NormMode, source: str, first: np.ndarray, second: np.ndarray
) -> None:
    low, high = STATISTICS[mode]
    where = f"{source}: statistics of the {feature}"
    advice = "they are placeholders or corrupt; pass the path of the dataset's real statistics"
    if first.ndim != 1 or first.shape != second.shape or not first.size:
        raise ProcessingError(
            f"{where}: {low} {first.shape} and {high} {second.shape} must be vectors of one length"
        )
    for name, values in ((low, first), (high, second)):
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            raise ProcessingError(
                f"{where}: {name} is {values[bad[0]]} in column {bad[0]}; {advice}"
            )
    wrong = np.flatnonzero(second < 0 if mode is NormMode.MEAN_STD else first > second)
    if wrong.size:
        at = wrong[0]
        fault = (
            f"std {second[at]:g} is negative"
            if mode is NormMode.MEAN_STD
            else f"{low} {first[at]:g} is above {high} {second[at]:g}"
        )
        raise ProcessingError(f"{where}: {fault} in column {at}; {advice}")
