"""The Gemma decoder bodies of the language model and of the action expert."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from phyai.layers import (
    AdaRMSNorm,
    GatedMLP,
    Leg,
    Linear,
    PagedAttention,
    RMSNorm,
    RotaryEmbedding,
)
from phyai.models.pi05.sizes import DecoderSizes
from phyai.models.pi05.tail import KeyValueLayer
from phyai.runtime.paged import PagedKVCache, PagedPlan


@dataclass(frozen=True)
class Projected:
    """Rotated queries and keys, values, and what the residual needs later.

    Attributes:
        query: [T, heads, head_dim].
        key: [T, kv_heads, head_dim].
        value: [T, kv_heads, head_dim].
        gate: [1 or T, width] of an adaptive norm, else None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor | None


@dataclass(frozen=True)
class LayerModulation:
    """``(scale, shift, gate)`` [1 or T, 3 * width] for the two norms of one layer."""

    attention: Tensor
    mlp: Tensor


class DecoderLayer(nn.Module):
    """Norm, attention, norm, gated MLP; split so that attention can be shared with another body.

    Args:
        sizes: of the body.
        prefix: checkpoint name of the layer.
        index: layer index, which is its place in the cache.
        role: call-site role of its matrix products.
        attention_role: call-site role of its attention.
        adaptive: adaptive norms conditioned on a vector of the body's width.
        params_dtype: of weights and activations.
        device: where the weights live.
    """

    def __init__(
        self,
        sizes: DecoderSizes,
        *,
        prefix: str,
        index: int,
        role: str,
        attention_role: str,
        adaptive: bool,
        params_dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        query_width = sizes.heads * sizes.head_dim
        kv_width = sizes.kv_heads * sizes.head_dim
        self.input_layernorm, self.post_attention_layernorm = (
            _norm(sizes.width, f"{prefix}.{name}", adaptive, params_dtype, device, adds=adds)
            for name, adds in (("input_layernorm", False), ("post_attention_layernorm", True))
        )
        self.qkv_proj = Linear(
            sizes.width,
            (
                Leg("q_proj", query_width, "q"),
                Leg("k_proj", kv_width, "k"),
                Leg("v_proj", kv_width, "v"),
            ),
            prefix=f"{prefix}.self_attn.qkv_proj",
            role=role,
            params_dtype=params_dtype,
            device=device,
        )
        self.o_proj = Linear(
            query_width,
            sizes.width,
            prefix=f"{prefix}.self_attn.o_proj",
            role=role,
            params_dtype=params_dtype,
            device=device,
        )
        self.attention = PagedAttention(
            sizes.heads, sizes.kv_heads, sizes.head_dim, layer=index, role=attention_role
        )
        self.mlp = GatedMLP(
            sizes.width,
            sizes.mlp,
            prefix=f"{prefix}.mlp",
            role=role,
            params_dtype=params_dtype,
            device=device,
        )

    def modulation(self, cond: Tensor) -> LayerModulation | None:
        """Returns the modulation of both norms for ``cond`` [1 or T, width], None if plain."""
        if isinstance(self.input_layernorm, RMSNorm):
            return None
        assert isinstance(self.post_attention_layernorm, AdaRMSNorm)
        return LayerModulation(
            self.input_layernorm.modulation(cond), self.post_attention_layernorm.modulation(cond)
        )

    def project(
        self,
        x: Tensor,
        positions: Tensor,
        rope: RotaryEmbedding,
        modulation: LayerModulation | None = None,
    ) -> Projected:
        """Normalises ``x`` [T, width], projects it and rotates queries and keys."""
        sizes = self.sizes
        normed, gate = _apply(self.input_layernorm, x, modulation and modulation.attention)
        heads = self.qkv_proj(normed).view(x.shape[0], -1, sizes.head_dim)
        query, key, value = heads.split((sizes.heads, sizes.kv_heads, sizes.kv_heads), dim=1)
        query, key = rope(positions, query, key)
        return Projected(query, key, value, gate)

    def finish(
        self,
        x: Tensor,
        attended: Tensor,
        gate: Tensor | None,
        modulation: LayerModulation | None = None,
    ) -> Tensor:
        """Adds the attention output [T, heads, head_dim] and the MLP to ``x`` [T, width]."""
        update, norm = self.o_proj(attended.flatten(1)), self.post_attention_layernorm
        if isinstance(norm, RMSNorm):
            normed, x = norm.add(update, x)
            return x + self.mlp(normed)
        assert gate is not None, "adaptive norms have a gate"
        assert modulation is not None, "adaptive norms need a modulation"
        normed, x, gate = norm.add(update, x, gate, modulation.mlp)
        return x + self.mlp(normed) * gate

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        rope: RotaryEmbedding,
        cache: PagedKVCache,
        first_slot: int,
        plan: PagedPlan,
        modulation: LayerModulation | None = None,
    ) -> Tensor:
        """Runs the layer on packed rows, storing their keys from ``first_slot`` on."""
        projected = self.project(x, positions, rope, modulation)
        cache.write(self.attention.layer, first_slot, projected.key, projected.value)
        attended = self.attention(projected.query, cache, plan)
        return self.finish(x, attended, projected.gate, modulation)


def _norm(
    width: int,
    prefix: str,
    adaptive: bool,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    adds: bool = False,
) -> RMSNorm | AdaRMSNorm:
    if adaptive:
        return AdaRMSNorm(width, width, prefix=prefix, device=device)
    return RMSNorm(width, prefix=prefix, adds=adds, activation_dtype=dtype, device=device)


def _apply(norm: nn.Module, x: Tensor, modulation: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return (norm(x), None) if modulation is None else norm(x, modulation)


class Decoder(nn.Module):
    """A stack of decoder layers with a final norm.

    Args:
        sizes: of the body.
        prefix: checkpoint name of the body.
        role: call-site role of its matrix products.
        attention_role: call-site role of its attention.
        adaptive: adaptive norms everywhere, the final one included.
        keys_only: of the last layer keep only what makes its keys and values.
        params_dtype: of weights and activations.
        device: where the weights live.
    """

    def __init__(
        self,
        sizes: DecoderSizes,
        *,
        prefix: str,
        role: str,
        attention_role: str,
        adaptive: bool,
        params_dtype: torch.dtype,
        device: torch.device | str,
        keys_only: bool = False,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        blocks = nn.ModuleList(
            DecoderLayer(
                sizes,
                prefix=f"{prefix}.layers.{index}",
                index=index,
                role=role,
                attention_role=attention_role,
                adaptive=adaptive,
                params_dtype=params_dtype,
                device=device,
            )
            for index in range(sizes.layers - keys_only)
        )
        self.layers = cast("Sequence[DecoderLayer]", blocks)
        self.tail: KeyValueLayer | None = None
        self.norm: RMSNorm | AdaRMSNorm | None = None
        if keys_only:
            self.tail = KeyValueLayer(
                sizes, body=prefix, role=role, params_dtype=params_dtype, device=device
            )
        else:
            self.norm = _norm(sizes.width, f"{prefix}.norm", adaptive, params_dtype, device)

    def final_norm(self, x: Tensor, modulation: Tensor | None = None) -> Tensor:
        """Applies the last norm; an adaptive one's gate has no residual and is dropped."""
        assert self.norm is not None, "a body without its last layer's output has no final norm"
        return _apply(self.norm, x, modulation)[0]

    def modulations(self, cond: Tensor) -> tuple[list[LayerModulation | None], Tensor | None]:
        """Returns the modulation of every layer and of the final norm for ``cond``."""
        final = self.norm.modulation(cond) if isinstance(self.norm, AdaRMSNorm) else None
        return [layer.modulation(cond) for layer in self.layers], final
