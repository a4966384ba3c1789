"""The action expert's layers in one launch on a Hopper GPU, for plain bf16 weights."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from phyai.kernels.decoder_fused import shifted_products
from phyai.triton import persistent_decoder as kernels

_KEY = "persistent"
_ADDRESSES: WeakKeyDictionary[Any, tuple[tuple[int, ...], Tensor]] = WeakKeyDictionary()


def run_persistent(
    decoder: Any,
    x: Tensor,
    place: Any,
    modulations: Sequence[Any],
    final: Tensor,
    constants: dict[str, Any],
) -> tuple[Tensor, None, None]:
    """Runs the operation ``decoder_layers``; see its signature.

    What depends on weights and modulations only is computed once and kept in ``constants``.
    """
    if _KEY not in constants:
        constants[_KEY] = _layers(decoder, modulations, final)
    cache = place.cache
    residual = kernels.run_layers(
        constants[_KEY], x, place.plan, cache.keys, cache.values, rotation=place.angles(),
        first_slot=place.first_slot,
    )  # fmt: skip
    return residual, None, None


def _layers(decoder: Any, modulations: Sequence[Any], final: Tensor) -> kernels.Layers:
    sizes, first = decoder.sizes, decoder.layers[0]
    width = sizes.width
    scales = [one.attention[0, :width] for one in modulations] + [final[0, :width]]
    return kernels.Layers(
        addresses=_addresses(decoder),
        constants=torch.stack(
            [
                kernels.layer_constants(shifted, one.attention[0], one.mlp[0], following)
                for shifted, one, following in zip(
                    shifted_products(decoder, modulations), modulations, scales[1:], strict=True
                )
            ]
        ),
        first_scale=scales[0].float().contiguous(),
        width=width,
        mlp=sizes.mlp,
        heads=sizes.heads,
        dim=sizes.head_dim,
        eps=first.input_layernorm.eps,
        scale=first.attention.scale,
    )


def _addresses(decoder: Any) -> Tensor:
    """Returns where the weights are, int64 [layers, 4]; copied to the device once."""
    weights = [
        weight
        for layer in decoder.layers
        for weight in (
            layer.qkv_proj.weight,
            layer.o_proj.weight,
            layer.mlp.gate_up_proj.weight,
            layer.mlp.down_proj.weight,
        )
    ]
    for weight in weights:
        if not weight.is_contiguous() or weight.data_ptr() % 16:
            raise ValueError(
                f"a weight has shape {tuple(weight.shape)}, strides {weight.stride()} and starts "
                f"at {weight.data_ptr():#x}; the kernel needs contiguous rows at multiples of 16 "
                "bytes: clone it, or choose another row"
            )
    found = tuple(weight.data_ptr() for weight in weights)
    known = _ADDRESSES.get(decoder)
    if known is None or known[0] != found:
        table = torch.tensor(found, dtype=torch.int64).view(-1, 4).to(weights[0].device)
        known = _ADDRESSES[decoder] = found, table
    return known[1]
