"""The action expert's layers in five or six launches each, for plain bf16 weights."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from phyai.triton import decoder as kernels
from phyai.triton.segments import attend

_KEY = "shifted"


def run_fused(
    decoder: Any,
    x: Tensor,
    place: Any,
    modulations: Sequence[Any],
    final: Tensor,
    constants: dict[str, Any],
) -> tuple[Tensor, None, None]:
    """Runs the operation ``decoder_layers``; see its signature.

    What the shifts of the norms contribute to the products is computed once and kept in
    ``constants``, in fp32.
    """
    width, heads = decoder.sizes.width, decoder.sizes.heads
    if _KEY not in constants:
        constants[_KEY] = shifted_products(decoder, modulations)
    counters = kernels.counters_for(x.shape[0], width, x.device)
    rotation = place.angles()
    scales = [one.attention[0, :width] for one in modulations] + [final[0, :width]]
    normed = kernels.enter(x, scales[0])
    for index, layer in enumerate(decoder.layers):
        attention, mlp = modulations[index].attention[0], modulations[index].mlp[0]
        qkv_shift, gate_up_shift = constants[_KEY][index]
        keys, values = place.cache.pages(layer.attention.layer)
        query = kernels.norm_qkv(
            normed,
            layer.qkv_proj.weight,
            qkv_shift,
            heads=heads,
            rotation=rotation,
            keys=keys,
            values=values,
            first_slot=place.first_slot,
            eps=layer.input_layernorm.eps,
        )
        attended = attend(query, keys, values, place.plan, scale=layer.attention.scale)
        normed = kernels.add_product(
            attended.flatten(1), layer.o_proj.weight, normed.residual,
            attention[2 * width :], mlp[:width], counters, kernels.OUT,
        )  # fmt: skip
        hidden = kernels.norm_gate_up(
            normed,
            layer.mlp.gate_up_proj.weight,
            gate_up_shift,
            eps=layer.post_attention_layernorm.eps,
        )
        normed = kernels.add_product(
            hidden, layer.mlp.down_proj.weight, normed.residual,
            mlp[2 * width :], scales[index + 1], counters, kernels.DOWN,
        )  # fmt: skip
    return normed.residual, None, None


def shifted_products(decoder: Any, modulations: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    """Returns, for each layer, both norms' shifts times the weights behind them, in fp32."""
    width = decoder.sizes.width
    return [
        (
            layer.qkv_proj.weight.float() @ one.attention[0, width : 2 * width],
            layer.mlp.gate_up_proj.weight.float() @ one.mlp[0, width : 2 * width],
        )
        for layer, one in zip(decoder.layers, modulations, strict=True)
    ]
