"""The generation tower: media tokens that attend to the text and to each other."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from phyai.kernels.fp8_rows import Fp8Rows
from phyai.layers import CachelessAttention, Linear, QKVParallelLinear, RMSNorm, RowParallelLinear
from phyai.layers.norm import normed_for
from phyai.models.cosmos3.blocks import (
    FeedForward,
    LayerNames,
    Placement,
    norm,
    out_projection,
    qkv_projection,
)
from phyai.models.cosmos3.branches import BranchGroup
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.heads_norm import NormRotateStore


class GenerationLayer(nn.Module):
    """Norm, full attention to text and media, norm, feed-forward block.

    Args:
        config: sizes.
        index: of the layer.
        place: of the weights.
    """

    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm

    def __init__(self, config: Cosmos3Config, index: int, place: Placement) -> None:
        super().__init__()
        names = LayerNames("generation", index)
        self.index = index
        self.input_layernorm, self.post_attention_layernorm = (
            norm(config, names.stored_norm(name), place, adds=adds)
            for name, adds in (("input_layernorm", index > 0), ("post_attention_layernorm", True))
        )
        self.qkv_proj: QKVParallelLinear = qkv_projection(config, names, place)
        heads, kv_heads = self.qkv_proj.heads, self.qkv_proj.kv_heads
        attention = f"{names.stored}.self_attn"
        self.head_norms: NormRotateStore = NormRotateStore(
            heads,
            kv_heads,
            config.head_dim,
            eps=config.rms_norm_eps,
            stored=(f"{attention}.norm_added_q", f"{attention}.norm_added_k"),
            role=names.tower,
            device=place.device,
        )
        self.attention: CachelessAttention = CachelessAttention(
            heads, config.head_dim, role=names.tower, kv_heads=kv_heads, layer=index
        )
        self.to_out: RowParallelLinear = out_projection(config, names, place)
        self.mlp: FeedForward = FeedForward(config, names, place)

    def forward(
        self, residual: Tensor, update: Tensor | None, group: BranchGroup
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer on ``residual + update``, both [branches * tokens, hidden].

        Returns:
            Residual and update behind the layer.
        """
        normed, residual = normed_for(self.qkv_proj, self.input_layernorm, residual, update)
        keys, values = group.layer(self.index)
        query = self.head_norms(self.qkv_proj(normed), group.rotation, group.slots, keys, values)
        attended = [
            self.attention(part[None], keys[None, span], values[None, span])[0]
            for part, span in zip(query.split(group.tokens), group.spans, strict=True)
        ]
        update = self.to_out(joined_for(self.to_out, attended))
        normed, residual = normed_for(self.mlp.up, self.post_attention_layernorm, residual, update)
        return residual, self.mlp(normed)


class GenerationTower(nn.Module):
    """All layers and the final norm.

    Args:
        config: sizes.
        place: of the weights.
    """

    def __init__(self, config: Cosmos3Config, place: Placement) -> None:
        super().__init__()
        blocks = nn.ModuleList(
            GenerationLayer(config, index, place) for index in range(config.num_hidden_layers)
        )
        self.layers: Sequence[GenerationLayer] = cast("Sequence[GenerationLayer]", blocks)
        self.norm: RMSNorm = norm(config, "norm_moe_gen", place, adds=True)

    def forward(self, x: Tensor, group: BranchGroup) -> Tensor:
        """Maps tokens [branches * tokens, hidden] to the final norm's output of that shape."""
        update: Tensor | None = None
        for layer in self.layers:
            x, update = layer(x, update, group)
        assert update is not None
        return self.norm.add(update, x)[0]


def joined_for(linear: Linear, parts: Sequence[Tensor]) -> Tensor | Fp8Rows:
    """Joins the rows of ``parts`` [T, heads, head_dim] as the product behind wants to read them.

    Args:
        linear: what reads the output [sum of T, heads * head_dim].
        parts: attention of each branch.
    """
    if len(parts) == 1:
        return parts[0].flatten(1)
    first, rows = parts[0], sum(part.shape[0] for part in parts)
    if linear.takes_fp8_rows(rows, first.dtype, first.device):
        from phyai.triton.fp8_rows import quantize_parts

        return Fp8Rows(*quantize_parts([part.flatten(1) for part in parts]), first.dtype)
    return torch.cat([*parts]).flatten(1)
