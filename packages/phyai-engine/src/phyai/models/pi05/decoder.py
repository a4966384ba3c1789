"""The Gemma decoder bodies of the language model and of the action expert."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from phyai.dispatch import CallSite
from phyai.layers import (
    AdaRMSNorm,
    GatedMLP,
    Leg,
    Linear,
    PagedAttention,
    RMSNorm,
)
from phyai.models.pi05.sizes import DecoderSizes
from phyai.models.pi05.stream import LayerModulation, Place, Stream, normalise
from phyai.models.pi05.tail import KeyValueLayer
from phyai.runtime.segments import SegmentPlan


class DecoderLayer(nn.Module):
    """Norm, attention, norm, gated MLP; attention may see another body's keys.

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

    input_layernorm: RMSNorm | AdaRMSNorm
    post_attention_layernorm: RMSNorm | AdaRMSNorm

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
            for name, adds in (("input_layernorm", index > 0), ("post_attention_layernorm", True))
        )
        self.qkv_proj: Linear = Linear(
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
        self.o_proj: Linear = Linear(
            query_width,
            sizes.width,
            prefix=f"{prefix}.self_attn.o_proj",
            role=role,
            params_dtype=params_dtype,
            device=device,
        )
        self.attention: PagedAttention = PagedAttention(
            sizes.heads, sizes.kv_heads, sizes.head_dim, layer=index, role=attention_role
        )
        self.mlp: GatedMLP = GatedMLP(
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

    def forward(
        self, stream: Stream, place: Place, modulation: LayerModulation | None = None
    ) -> Stream:
        """Runs the layer on packed rows and stores their keys and values."""
        heads, stream = self.project(stream, modulation)
        keys, values = place.cache.pages(self.attention.layer)
        query = place.rope.append(place.positions, heads, keys, values, place.first_slot)
        attended = self.attention(query, place.cache, place.plan)
        return self.finish(stream, attended, modulation)

    def project(
        self, stream: Stream, modulation: LayerModulation | None = None
    ) -> tuple[Tensor, Stream]:
        """Runs the layer up to its attention.

        Returns:
            Queries, keys and values [T, heads + 2 * kv_heads, head_dim], not rotated, and the
            stream that `finish` takes.
        """
        first = None if modulation is None else modulation.attention
        normed, stream = normalise(self.input_layernorm, stream, first, self.qkv_proj)
        return self.qkv_proj(normed).view(normed.shape[0], -1, self.sizes.head_dim), stream

    def finish(
        self, stream: Stream, attended: Tensor, modulation: LayerModulation | None = None
    ) -> Stream:
        """Runs the layer from its attention's output [T, heads, head_dim] on."""
        second = None if modulation is None else modulation.mlp
        stream = Stream(stream.residual, self.o_proj(attended.flatten(1)), stream.gate)
        normed, stream = normalise(
            self.post_attention_layernorm, stream, second, self.mlp.gate_up_proj
        )
        return Stream(stream.residual, self.mlp(normed), stream.gate)


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
        self.layers: Sequence[DecoderLayer] = cast("Sequence[DecoderLayer]", blocks)
        self._site = CallSite(
            "decoder_layers",
            role=role,
            dims={
                "hidden": sizes.width,
                "mlp": sizes.mlp,
                "heads": sizes.heads,
                "kv_heads": sizes.kv_heads,
                "head_dim": sizes.head_dim,
            },
            attrs={"adaptive": adaptive},
        )
        self.tail: KeyValueLayer | None = None
        self.norm: RMSNorm | AdaRMSNorm | None = None
        if keys_only:
            self.tail = KeyValueLayer(
                sizes, body=prefix, role=role, params_dtype=params_dtype, device=device
            )
        else:
            self.norm = _norm(
                sizes.width, f"{prefix}.norm", adaptive, params_dtype, device, adds=True
            )

    def forward(
        self,
        x: Tensor,
        place: Place,
        modulations: Sequence[LayerModulation | None] = (),
        final: Tensor | None = None,
        constants: dict[str, Any] | None = None,
    ) -> Stream:
        """Runs every layer on packed rows ``x`` [T, width]; the final norm is left to do.

        Args:
            x: [T, width].
            place: positions, cache and visible slots.
            modulations: of each layer, where norms are adaptive.
            final: modulation of the final norm; a fused row may need it before.
            constants: where a row keeps what depends on weights and modulations only.
        """
        selection = self._site.select(
            device=x.device,
            dtype={"input": x.dtype},
            quant=self._common_format(),
            dims={"tokens": x.shape[0]},
            attrs={
                "segments": isinstance(place.plan, SegmentPlan),
                "shared_modulation": all(
                    one is not None and one.attention.shape[0] == 1 for one in modulations
                ),
            },
        )
        kept = {} if constants is None else constants
        return Stream(*selection.execute(self, x, place, modulations, final, kept))

    def run_layers(
        self, x: Tensor, place: Place, modulations: Sequence[LayerModulation | None]
    ) -> Stream:
        """Runs the layers one after the other."""
        stream = Stream(x)
        for index, layer in enumerate(self.layers):
            stream = layer(stream, place, modulations[index] if modulations else None)
        return stream

    def _common_format(self) -> Any:
        """Returns the signature that all matrix products share, None if they differ."""
        found = {
            linear.spec.physical_signature
            for layer in self.layers
            for linear in (
                layer.qkv_proj,
                layer.o_proj,
                layer.mlp.gate_up_proj,
                layer.mlp.down_proj,
            )
        }
        return found.pop() if len(found) == 1 else None

    def final_norm(self, stream: Stream, modulation: Tensor | None = None) -> Tensor:
        """Applies the last norm; an adaptive one's gate has no residual and is dropped."""
        assert self.norm is not None, "a body without its last layer's output has no final norm"
        normed = normalise(self.norm, stream, modulation)[0]
        assert isinstance(normed, Tensor), "nothing behind the final norm reads rounded rows"
        return normed

    def modulations(self, cond: Tensor) -> tuple[list[LayerModulation | None], Tensor | None]:
        """Returns the modulation of every layer and of the final norm for ``cond``."""
        final = self.norm.modulation(cond) if isinstance(self.norm, AdaRMSNorm) else None
        return [layer.modulation(cond) for layer in self.layers], final
