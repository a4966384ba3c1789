"""Statistics of the training data and LeRobot's quantile normalisation."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
STATE = "observation.state"
ACTION = "action"

FeatureStatistics = Mapping[str, Tensor]
"""mean, std, min, max, q01, q10, q50, q90, q99: float32 [dims]; count: int64 [1]."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of the state and the action."""

    state: FeatureStatistics
    action: FeatureStatistics

    def to(self, device: torch.device | str) -> "Statistics":
        """The same statistics on `device`."""
        return Statistics(
            *({k: v.to(device) for k, v in part.items()} for part in (self.state, self.action))
        )

    def tensors(self) -> dict[str, Tensor]:
        """Flat tensors ``<feature>.<statistic>``, as LeRobot's processors store them."""
        parts = {STATE: self.state, ACTION: self.action}
        return {
            f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()
        }


def describe(values: Tensor) -> FeatureStatistics:
    """Statistics over the rows of `values` [N, dims], computed in float64 on the CPU."""
    data = values.detach().cpu().double()
    ordered = data.sort(dim=0).values
    result = {
        "mean": data.mean(dim=0),
        "std": data.std(dim=0, correction=0),
        "min": ordered[0],
        "max": ordered[-1],
    }
    for name, share in QUANTILES.items():
        place = share * (len(data) - 1)
        low = int(place)
        high = min(low + 1, len(data) - 1)
        result[name] = torch.lerp(ordered[low], ordered[high], place - low)
    return {k: v.float() for k, v in result.items()} | {"count": torch.tensor([len(data)])}


def normalise(values: Tensor, statistics: FeatureStatistics) -> Tensor:
    """LeRobot's QUANTILES mode: q01 becomes -1 and q99 becomes 1; nothing is clipped."""
    low, high = statistics["q01"], statistics["q99"]
    return 2 * (values - low) / _width(low, high) - 1


def denormalise(values: Tensor, statistics: FeatureStatistics) -> Tensor:
    """Inverse of `normalise`."""
    low, high = statistics["q01"], statistics["q99"]
    return (values + 1) / 2 * _width(low, high) + low


def _width(low: Tensor, high: Tensor) -> Tensor:
    width = high - low
    return torch.where(width == 0, torch.full_like(width, 1e-8), width)
