"""The understanding tower: reads the text once and leaves its keys and values."""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from phyai.checkpoints.slots import TensorSlot, unused_slot
from phyai.dispatch import CallSite
from phyai.layers import (
    CachelessAttention,
    Leg,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    UnusedLinear,
)
from phyai.models.cosmos3.blocks import (
    FeedForward,
    LayerNames,
    Placement,
    norm,
    options,
    out_projection,
    qkv_projection,
)
from phyai.models.cosmos3.config import Cosmos3Config


class TextHeads(nn.Module):
    """Norms and rotation of the text's query and key heads.

    The generation tower may see keys after a norm of their own (``k_norm_und_for_gen``), made
    from the keys as projected.

    Args:
        config: sizes and which norms there are.
        names: of the layer.
        place: of the weights.
        heads: query heads of this rank, 0 in a layer that has keys only.
        kv_heads: key and value heads of this rank.
    """

    def __init__(
        self,
        config: Cosmos3Config,
        names: LayerNames,
        place: Placement,
        *,
        heads: int,
        kv_heads: int,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads

        def head_norm(name: str) -> nn.Module:
            stored = f"{names.stored}.self_attn.{name}"
            return norm(config, stored, place, adds=False, width=config.head_dim)

        normed = config.qk_norm_for_text
        self.norm_q: nn.Module | None = head_norm("norm_q") if normed and heads else None
        self.norm_k: nn.Module | None = (
            head_norm("norm_k") if normed and self._uses_own(config, heads) else None
        )
        self.norm_seen: nn.Module | None = (
            head_norm("k_norm_und_for_gen") if config.use_und_k_norm_for_gen else None
        )
        self._site = CallSite(
            "rope",
            role=names.tower,
            dims={
                "head_dim": config.head_dim,
                "rotary_dim": config.head_dim,
                "heads_q": heads or kv_heads,
                "heads_k": kv_heads,
            },
            attrs={"rope_type": "default", "interleave": False},
        )

    @staticmethod
    def _uses_own(config: Cosmos3Config, heads: int) -> bool:
        """Whether keys normalised for the text itself are needed."""
        return bool(heads) or not config.use_und_k_norm_for_gen

    def forward(self, query: Tensor, key: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rotated queries and keys for the text's own attention.

        Args:
            query: [S, heads, head_dim].
            key: [S, kv_heads, head_dim].
            rotation: fp32 [S, head_dim].
        """
        query = query if self.norm_q is None else self.norm_q(query)
        key = key if self.norm_k is None else self.norm_k(key)
        return self._rotate(query, key, rotation)

    def seen(self, key: Tensor, rotated: Tensor | None, rotation: Tensor) -> Tensor:
        """Returns the keys that the generation tower sees.

        Args:
            key: [S, kv_heads, head_dim], as projected.
            rotated: what `forward` made of them, if it was called.
            rotation: fp32 [S, head_dim].
        """
        if self.norm_seen is None and rotated is not None:
            return rotated
        chosen = self.norm_k if self.norm_seen is None else self.norm_seen
        key = key if chosen is None else chosen(key)
        return self._rotate(key, key, rotation)[1]

    def _rotate(self, query: Tensor, key: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        selection = self._site.select(
            device=query.device, dtype={"input": query.dtype}, dims={"tokens": query.shape[0]}
        )
        positions = torch.arange(query.shape[0], device=query.device)
        return selection.execute(positions, query, key, rotation)


class TextLayer(nn.Module):
    """Norm, causal attention, norm, feed-forward block.

    Args:
        config: sizes.
        index: of the layer.
        place: of the weights.
    """

    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm

    def __init__(self, config: Cosmos3Config, index: int, place: Placement) -> None:
        super().__init__()
        names = LayerNames("understanding", index)
        self.head_dim: int = config.head_dim
        self.input_layernorm, self.post_attention_layernorm = (
            norm(config, names.stored_norm(name), place, adds=adds)
            for name, adds in (("input_layernorm", index > 0), ("post_attention_layernorm", True))
        )
        self.qkv_proj: QKVParallelLinear = qkv_projection(config, names, place)
        heads, kv_heads = self.qkv_proj.heads, self.qkv_proj.kv_heads
        self.text_heads: TextHeads = TextHeads(config, names, place, heads=heads, kv_heads=kv_heads)
        self.attention: CachelessAttention = CachelessAttention(
            heads,
            config.head_dim,
            role=names.tower,
            kv_heads=kv_heads,
            causal=True,
            layer=index,
        )
        self.to_out: RowParallelLinear = out_projection(config, names, place)
        self.mlp: FeedForward = FeedForward(config, names, place)

    def forward(
        self, residual: Tensor, update: Tensor | None, rotation: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Runs the layer on ``residual + update``, both [S, hidden].

        Returns:
            Residual and update behind the layer, and the keys and values [S, kv_heads, head_dim]
            that the generation tower sees.
        """
        if update is None:
            normed = self.input_layernorm(residual)
        else:
            normed, residual = self.input_layernorm.add(update, residual)
        heads, kv_heads = self.qkv_proj.heads, self.qkv_proj.kv_heads
        packed = self.qkv_proj(normed).unflatten(1, (-1, self.head_dim))
        query, key, value = packed.split((heads, kv_heads, kv_heads), dim=1)
        turned, rotated = self.text_heads(query, key, rotation)
        attended = self.attention(turned[None], rotated[None], value[None])[0]
        normed, residual = self.post_attention_layernorm.add(
            self.to_out(attended.flatten(1)), residual
        )
        return residual, self.mlp(normed), self.text_heads.seen(key, rotated, rotation), value


class LastTextLayer(nn.Module):
    """The last layer, of which only keys and values are read: one norm and one projection.

    Its queries, attention, feed-forward block and the tower's last norm are neither computed nor
    kept. Their tensors are still expected in the checkpoint.

    Args:
        config: sizes.
        place: of the weights.
    """

    def __init__(self, config: Cosmos3Config, place: Placement) -> None:
        super().__init__()
        self.names: LayerNames = LayerNames("understanding", config.num_hidden_layers - 1)
        names = self.names
        self.config = config
        tp = place.tp
        self.input_layernorm: RMSNorm = norm(
            config,
            names.stored_norm("input_layernorm"),
            place,
            adds=config.num_hidden_layers > 1,
        )
        width = config.num_key_value_heads * config.head_dim
        replicas = max(tp.size // config.num_key_value_heads, 1)
        self.kv_proj: MergedColumnParallelLinear = MergedColumnParallelLinear(
            config.hidden_size,
            (Leg("k_proj", width, "k"), Leg("v_proj", width, "v")),
            tp=tp,
            replicas=(replicas, replicas),
            prefix=f"{names.attention}.qkv_proj",
            stored=[names.stored_attention("k"), names.stored_attention("v")],
            **options(names, place),
        )
        kv_heads = self.kv_proj.out_features // (2 * config.head_dim)
        self.text_heads: TextHeads = TextHeads(config, names, place, heads=0, kv_heads=kv_heads)
        self.unused: nn.ModuleList = nn.ModuleList(self._unused_linears())

    def _unused_linears(self) -> Iterator[UnusedLinear]:
        config, names = self.config, self.names
        hidden, mlp = config.hidden_size, config.intermediate_size
        queries = config.num_attention_heads * config.head_dim
        parts = [
            (names.stored_attention("q"), f"{names.attention}.q_proj", (queries, hidden)),
            (names.stored_attention("out"), f"{names.attention}.to_out", (hidden, queries)),
            (f"{names.stored_mlp}.up_proj", f"{names.mlp}.up_proj", (mlp, hidden)),
            (f"{names.stored_mlp}.down_proj", f"{names.mlp}.down_proj", (hidden, mlp)),
        ]
        if config.gated:
            gate = (f"{names.stored_mlp}.gate_proj", f"{names.mlp}.gate_proj", (mlp, hidden))
            parts.append(gate)
        for stored, prefix, shape in parts:
            yield UnusedLinear(stored, shape, prefix=prefix, stored=(stored,))

    def forward(
        self, residual: Tensor, update: Tensor | None, rotation: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the keys and values [S, kv_heads, head_dim] that the generation tower sees."""
        normed = (
            self.input_layernorm(residual)
            if update is None
            else self.input_layernorm.add(update, residual)[0]
        )
        key, value = self.kv_proj(normed).unflatten(1, (-1, self.config.head_dim)).chunk(2, dim=1)
        return self.text_heads.seen(key, None, rotation), value

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields the vectors that are expected and left out."""
        hidden, head_dim = (self.config.hidden_size,), (self.config.head_dim,)
        attention = f"{self.names.stored}.self_attn"
        stored = self.names.stored_norm("post_attention_layernorm")
        yield unused_slot(f"{stored}.weight", hidden)
        yield unused_slot("norm.weight", hidden)
        if self.config.qk_norm_for_text:
            yield unused_slot(f"{attention}.norm_q.weight", head_dim)
            if self.text_heads.norm_k is None:
                yield unused_slot(f"{attention}.norm_k.weight", head_dim)


class UnderstandingTower(nn.Module):
    """All layers of the tower.

    Args:
        config: sizes.
        place: of the weights.
    """

    def __init__(self, config: Cosmos3Config, place: Placement) -> None:
        super().__init__()
        blocks = nn.ModuleList(
            TextLayer(config, index, place) for index in range(config.num_hidden_layers - 1)
        )
        self.layers: Sequence[TextLayer] = cast("Sequence[TextLayer]", blocks)
        self.last: LastTextLayer = LastTextLayer(config, place)

    def forward(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Maps embedded text [S, hidden] to keys and values [layers, S, kv_heads, head_dim].

        Args:
            x: [S, hidden].
            rotation: fp32 [S, head_dim].
        """
        update: Tensor | None = None
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for layer in self.layers:
            x, update, key, value = layer(x, update, rotation)
            keys.append(key)
            values.append(value)
        key, value = self.last(x, update, rotation)
        return torch.stack([*keys, key]), torch.stack([*values, value])
