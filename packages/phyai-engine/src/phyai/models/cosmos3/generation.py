"""The generation tower: media tokens that attend to the text and to each other."""

from collections.abc import Sequence
from functools import partial
from typing import cast

from torch import Tensor, nn

from phyai.kernels.fp8_rows import Fp8Rows, Int8Rows, RoundedRows
from phyai.layers import CachelessAttention, Linear, QKVParallelLinear, RMSNorm, RowParallelLinear
from phyai.layers.attention import JoinHeads
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
from phyai.runtime.streams import side_by_side


class GenerationLayer(nn.Module):
    """Norm, full attention to text and media, norm, feed-forward block.

    Args:
        config: sizes.
        index: of the layer.
        place: of the weights.

    Attributes:
        overlaps: whether the attention of branches runs on streams of their own, so that one fills
            the processors that the end of the other leaves free.
    """

    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm
    overlaps: bool = True

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
        self.join: JoinHeads = JoinHeads(heads, config.head_dim, role=names.tower)
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
        query = self.head_norms(
            self.qkv_proj(normed), group.rotation, group.slots, keys, values, len(group.lengths)
        )
        attended = self._attend(query, keys, values, group)
        update = self.to_out(joined_for(self.to_out, self.join, attended))
        normed, residual = normed_for(self.mlp.up, self.post_attention_layernorm, residual, update)
        return residual, self.mlp(normed)

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, group: BranchGroup
    ) -> list[Tensor]:
        """Returns the attention [tokens, heads, head_dim] of each branch to its own keys."""
        runs = [
            partial(self._attend_one, part, keys[None, span], values[None, span])
            for part, span in zip(query.split(1), group.spans, strict=True)
        ]
        if self.overlaps:
            return side_by_side(runs, query.device)
        return [run() for run in runs]

    def _attend_one(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self.attention(query, keys, values)[0]


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


def joined_for(linear: Linear, join: JoinHeads, parts: Sequence[Tensor]) -> Tensor | RoundedRows:
    """Joins the rows of ``parts`` [T, heads, head_dim] as the product behind wants to read them.

    Args:
        linear: what reads the output [sum of T, heads * head_dim].
        join: joins values.
        parts: attention of each branch.
    """
    first, rows = parts[0], sum(part.shape[0] for part in parts)
    place = rows, first.dtype, first.device
    if linear.takes_fp8_rows(*place):
        from phyai.triton.fp8_rows import quantize_parts

        return Fp8Rows(*quantize_parts(parts), first.dtype)
    group = linear.takes_int8_rows(*place)
    if group is not None:
        from piper_kernels.linear.convrot.int8.rows import joined_rows

        return Int8Rows(*joined_rows(parts, group), first.dtype)
    return join(parts)
