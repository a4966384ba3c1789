"""The action expert's layers in five or six launches each, for FP8 weights with row scales."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from phyai.triton import decoder_fp8 as kernels
from phyai.triton.decoder import counters_for, enter
from phyai.triton.segments import attend

_KEY = "shifted_fp8"


def run_fused_fp8(
    decoder: Any,
    x: Tensor,
    place: Any,
    modulations: Sequence[Any],
    final: Tensor,
    constants: dict[str, Any],
) -> tuple[Tensor, None, None]:
    """Runs the operation ``decoder_layers``; see its signature.

    Products read codes and leave activations in bf16, which is nearer to the unquantized layers
    than rounding both is. What the shifts of the norms contribute to the products is computed once
    and kept in ``constants``, in fp32.
    """
    width, heads = decoder.sizes.width, decoder.sizes.heads
    if _KEY not in constants:
        constants[_KEY] = [
            (
                _values(layer.qkv_proj) @ one.attention[0, width : 2 * width],
                _values(layer.mlp.gate_up_proj) @ one.mlp[0, width : 2 * width],
            )
            for layer, one in zip(decoder.layers, modulations, strict=True)
        ]
    counters = counters_for(x.shape[0], width, x.device)
    rotation = place.angles()
    scales = [one.attention[0, :width] for one in modulations] + [final[0, :width]]
    normed = enter(x, scales[0])
    for index, layer in enumerate(decoder.layers):
        attention, mlp = modulations[index].attention[0], modulations[index].mlp[0]
        qkv_shift, gate_up_shift = constants[_KEY][index]
        keys, values = place.cache.pages(layer.attention.layer)
        query = kernels.norm_qkv(
            normed,
            _codes(layer.qkv_proj),
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
            attended.flatten(1), _codes(layer.o_proj), normed.residual,
            attention[2 * width :], mlp[:width], counters, kernels.OUT,
        )  # fmt: skip
        hidden = kernels.norm_gate_up(
            normed,
            _codes(layer.mlp.gate_up_proj),
            gate_up_shift,
            eps=layer.post_attention_layernorm.eps,
        )
        normed = kernels.add_product(
            hidden, _codes(layer.mlp.down_proj), normed.residual,
            mlp[2 * width :], scales[index + 1], counters, kernels.DOWN,
        )  # fmt: skip
    return normed.residual, None, None


def _codes(linear: Any) -> kernels.Codes:
    return kernels.Codes(linear.weight, linear.weight_scale)


def _values(linear: Any) -> Tensor:
    return linear.spec.dequantize_weight(linear)
