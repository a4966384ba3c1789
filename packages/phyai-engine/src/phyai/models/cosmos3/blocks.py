"""What both towers are made of: where a layer stands, projections, norms, feed-forward block."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from phyai.kernels.fp8_rows import RoundedRows
from phyai.layers import (
    Leg,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    TensorParallel,
)
from phyai.layers.mlp import Activation, fed_forward
from phyai.models.cosmos3.config import Cosmos3Config

TowerName = Literal["understanding", "generation"]


@dataclass(frozen=True)
class Placement:
    """Where and how the weights of a model live.

    Attributes:
        dtype: of weights and activations.
        device: of the weights.
        tp: this rank.
    """

    dtype: torch.dtype
    device: torch.device
    tp: TensorParallel


@dataclass(frozen=True)
class LayerNames:
    """How plans and policies call a layer's parts, and how the checkpoint does.

    A checkpoint has both towers in one list of layers; plans tell them apart.

    Attributes:
        tower: ``understanding`` or ``generation``.
        index: of the layer.
    """

    tower: TowerName
    index: int

    @property
    def generation(self) -> bool:
        """Whether the layer belongs to the generation tower."""
        return self.tower == "generation"

    @property
    def attention(self) -> str:
        """What plans call the attention block."""
        if self.generation:
            return f"gen_layers.{self.index}.cross_attention"
        return f"language_model.layers.{self.index}.self_attn"

    @property
    def mlp(self) -> str:
        """What plans call the feed-forward block."""
        body = "gen_layers" if self.generation else "language_model.layers"
        return f"{body}.{self.index}.mlp"

    @property
    def stored(self) -> str:
        """The checkpoint's name of the layer."""
        return f"layers.{self.index}"

    @property
    def stored_mlp(self) -> str:
        """The checkpoint's name of the feed-forward block."""
        return f"{self.stored}.mlp{self._suffix}"

    def stored_norm(self, name: str) -> str:
        """Returns the checkpoint's name of a norm over hidden vectors."""
        return f"{self.stored}.{name}{self._suffix}"

    def stored_attention(self, part: Literal["q", "k", "v", "out"]) -> str:
        """Returns the checkpoint's name of a projection of the attention block."""
        if not self.generation:
            return f"{self.stored}.self_attn.to_{part}"
        name = "to_add_out" if part == "out" else f"add_{part}_proj"
        return f"{self.stored}.self_attn.{name}"

    @property
    def _suffix(self) -> str:
        return "_moe_gen" if self.generation else ""


def options(names: LayerNames, place: Placement) -> dict[str, Any]:
    """Returns the arguments that all linear layers of a layer share."""
    return {"role": names.tower, "params_dtype": place.dtype, "device": place.device}


def qkv_projection(config: Cosmos3Config, names: LayerNames, place: Placement) -> QKVParallelLinear:
    """Returns the fused projection to queries, keys and values."""
    return QKVParallelLinear(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        tp=place.tp,
        prefix=f"{names.attention}.qkv_proj",
        stored=[names.stored_attention(part) for part in ("q", "k", "v")],
        **options(names, place),
    )


def out_projection(config: Cosmos3Config, names: LayerNames, place: Placement) -> RowParallelLinear:
    """Returns the projection behind attention."""
    return RowParallelLinear(
        config.num_attention_heads * config.head_dim,
        config.hidden_size,
        tp=place.tp,
        prefix=f"{names.attention}.to_out",
        stored=[names.stored_attention("out")],
        **options(names, place),
    )


def norm(
    config: Cosmos3Config, stored: str, place: Placement, *, adds: bool, width: int = 0
) -> RMSNorm:
    """Returns a norm of hidden vectors, or of vectors of another ``width``."""
    return RMSNorm(
        width or config.hidden_size,
        prefix=stored,
        eps=config.rms_norm_eps,
        variant="rms",
        adds=adds,
        activation_dtype=place.dtype,
        device=place.device,
    )


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))``, or ``down(relu(up(x))²)``.

    Args:
        config: sizes and activation.
        names: of the layer.
        place: of the weights.
    """

    def __init__(self, config: Cosmos3Config, names: LayerNames, place: Placement) -> None:
        super().__init__()
        width = config.intermediate_size
        parts = ("gate_proj", "up_proj") if config.gated else ("up_proj",)
        self.up: MergedColumnParallelLinear = MergedColumnParallelLinear(
            config.hidden_size,
            [Leg(name, width, index if config.gated else None) for index, name in enumerate(parts)],
            tp=place.tp,
            prefix=f"{names.mlp}.{'gate_up_proj' if config.gated else 'up_proj'}",
            stored=[f"{names.stored_mlp}.{name}" for name in parts],
            **options(names, place),
        )
        self.activation: Activation = Activation(
            config.hidden_act, gated=config.gated, width=self.up.out_features // len(parts)
        )
        self.down_proj: RowParallelLinear = RowParallelLinear(
            width,
            config.hidden_size,
            tp=place.tp,
            prefix=f"{names.mlp}.down_proj",
            stored=[f"{names.stored_mlp}.down_proj"],
            **options(names, place),
        )

    def forward(self, x: Tensor | RoundedRows) -> Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        return fed_forward(self.up, self.activation, self.down_proj, x)
