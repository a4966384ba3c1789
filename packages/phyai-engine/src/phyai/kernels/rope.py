"""Rotary position embedding.

Pairs are halves ``(i, i + rotary_dim / 2)``, or neighbours ``(2 i, 2 i + 1)`` when interleaved.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import eq, is_set, lib, one_of, same
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.dispatch.predicate import all_of
from phyai.kernels.bench_elementwise import rope_inputs
from phyai.kernels.conditions import FLASHINFER, HEAD_DIMS, half, returns


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    width = 2 * cos.shape[-1]
    wide = x[..., :width].float()
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., width:]), dim=-1)


def _eager_rope(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Any]:  # noqa: ARG001
    interleaved = facts.get("attrs.interleave") is True

    def run(
        positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos_sin_cache[positions].float().unsqueeze(-2).chunk(2, dim=-1)
        query = _rotate(q, cos, sin, interleaved=interleaved)
        return query, _rotate(k, cos, sin, interleaved=interleaved)

    return run


def _flashinfer_rope(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Any]:  # noqa: ARG001
    from flashinfer.rope import apply_rope_with_cos_sin_cache

    def run(
        positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        head_dim = q.shape[-1]
        query, key = apply_rope_with_cos_sin_cache(
            positions, q.flatten(-2), k.flatten(-2), head_dim, cos_sin_cache, is_neox=True
        )
        return query.view(q.shape), key.view(k.shape)

    return run


def rope_append(
    positions: Tensor,
    qkv: Tensor,
    cos_sin_cache: Tensor,
    keys: Tensor,
    values: Tensor,
    first_slot: int,
) -> Tensor:
    """Rotates the queries and keys of ``qkv`` and stores keys and values; returns the queries."""
    heads_k = keys.shape[2]
    cos, sin = cos_sin_cache[positions].float().unsqueeze(-2).chunk(2, dim=-1)
    q, k, v = qkv.split((qkv.shape[1] - 2 * heads_k, heads_k, heads_k), dim=1)
    stop = first_slot + qkv.shape[0]
    keys[first_slot:stop, 0] = _rotate(k, cos, sin, interleaved=False)
    values[first_slot:stop, 0] = v
    return _rotate(q, cos, sin, interleaved=False)


def _triton_append(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Any]:  # noqa: ARG001
    from phyai.triton.rope import rope_append

    return rope_append


def _populate_append(catalog: Catalog) -> None:
    catalog.register_op(
        OpSpec(
            name="rope_append",
            dims=("tokens", "head_dim", "heads_q", "heads_k"),
            dtypes=("input",),
            attributes={"rope_type": FactKind.STR},
            signature="(positions, qkv, cos_sin_cache, keys, values, first_slot) -> q",
            doc=(
                "Rotates queries and keys of qkv [T, heads_q + 2 heads_k, head_dim] by halves and "
                "stores keys and values [slots, 1, heads_k, head_dim] from first_slot on."
            ),
        )
    )
    catalog.register(
        Impl(
            kernel_id="triton.rope_append",
            op="rope_append",
            when=all_of(
                one_of("device.vendor", "nvidia", "amd"),
                lib("triton"),
                is_set("attrs.rope_type"),
                one_of("shape.head_dim", 16, 32, 64, 128, 256),
            ),
            prepare=_triton_append,
            priority=Priority.OPTIMIZED,
            metadata={"package": "triton"},
        )
    )
    catalog.register(
        Impl(
            kernel_id="eager.rope_append",
            op="rope_append",
            when=is_set("attrs.rope_type"),
            prepare=returns(rope_append),
            priority=Priority.REFERENCE,
            reference=True,
        )
    )


def populate(catalog: Catalog) -> None:
    """Declares ``rope``, ``rope_append`` and their rows."""
    _populate_append(catalog)
    catalog.register_op(
        OpSpec(
            name="rope",
            dims=("tokens", "head_dim", "rotary_dim", "heads_q", "heads_k"),
            dtypes=("input",),
            attributes={"rope_type": FactKind.STR, "interleave": FactKind.BOOL},
            optional_attributes={"rank": FactKind.INT},
            signature="(positions, q, k, cos_sin_cache) -> (q, k)",
            bench_args=rope_inputs,
            doc=(
                "positions [T]; q [T, heads_q, head_dim]; k [T, heads_k, head_dim]; cache fp32 "
                "[max_pos, rotary_dim], cosines then sines. Dims past rotary_dim are unchanged."
            ),
        )
    )
    pairs = eq("attrs.interleave", False, FactKind.BOOL)
    catalog.register(
        Impl(
            kernel_id="flashinfer.rope",
            op="rope",
            when=all_of(
                FLASHINFER,
                half("input"),
                pairs,
                one_of("shape.head_dim", *HEAD_DIMS),
                same("shape.rotary_dim", "shape.head_dim"),
            ),
            prepare=_flashinfer_rope,
            priority=Priority.OPTIMIZED + 2,
            metadata={"package": "flashinfer-python"},
        )
    )
    catalog.register(
        Impl(
            kernel_id="eager.rope",
            op="rope",
            when=is_set("attrs.rope_type"),
            prepare=_eager_rope,
            priority=Priority.REFERENCE,
            reference=True,
        )
    )
