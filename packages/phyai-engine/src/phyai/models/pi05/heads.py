"""Flow-matching heads: time embedding and the small fp32 networks around the expert."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from phyai.layers import Linear


def time_embedding(time: Tensor, width: int, min_period: float, max_period: float) -> Tensor:
    """Returns ``[sin(a), cos(a)]`` [B, width] in fp32 for times [B] in [0, 1].

    ``a_j = 2π t / period_j`` with ``width / 2`` periods in geometric progression from
    ``min_period`` to ``max_period``, built in fp64 because small periods amplify rounding.
    """
    steps = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    periods = min_period * (max_period / min_period) ** steps
    angles = 2 * math.pi * time.double()[:, None] / periods
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


class TimeCondition(nn.Module):
    """π0.5: maps the time embedding to the condition of all adaptive norms, in fp32."""

    def __init__(self, width: int, *, device: torch.device | str) -> None:
        super().__init__()
        self.time_mlp_in: Linear = head(width, width, "time_mlp_in", device)
        self.time_mlp_out: Linear = head(width, width, "time_mlp_out", device)

    def forward(self, embedding: Tensor) -> Tensor:
        """Maps [B, width] to the condition [B, width]."""
        hidden = functional.silu(self.time_mlp_in(embedding))
        return functional.silu(self.time_mlp_out(hidden))


class ActionTime(nn.Module):
    """π0: mixes each action token with the time embedding, in fp32."""

    def __init__(self, width: int, *, device: torch.device | str) -> None:
        super().__init__()
        self.action_time_mlp_in: Linear = head(2 * width, width, "action_time_mlp_in", device)
        self.action_time_mlp_out: Linear = head(width, width, "action_time_mlp_out", device)

    def forward(self, actions: Tensor, embedding: Tensor) -> Tensor:
        """Maps action tokens [B, T, width] and times [1 or B, width] to [B, T, width]."""
        time = embedding[:, None].expand(actions.shape[0], actions.shape[1], -1)
        hidden = self.action_time_mlp_in(torch.cat([actions, time], dim=2))
        return self.action_time_mlp_out(functional.silu(hidden))


def head(in_features: int, out_features: int, name: str, device: torch.device | str) -> Linear:
    """Returns a biased linear layer kept in fp32, as all action and time heads are."""
    return Linear(
        in_features,
        out_features,
        bias=True,
        prefix=name,
        role="head",
        params_dtype=torch.float32,
        device=device,
    )
