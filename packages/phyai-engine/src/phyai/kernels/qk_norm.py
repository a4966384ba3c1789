"""RMS norm of query and key heads, rotation, and storing of keys and values as one operation."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import lib, one_of
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.dispatch.predicate import all_of
from phyai.kernels.bench import random_tensor
from phyai.kernels.norm import normalized

_VARIANT = one_of("attrs.variant", "rms", "rms_cast", kind=FactKind.STR)


def qk_norm_rope_append(
    qkv: Tensor,
    weight_q: Tensor,
    weight_k: Tensor,
    rotation: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    eps: float,
    items: int | None = None,
    *,
    cast_first: bool,
) -> Tensor:
    """The reference; arguments as in `phyai.triton.qk_norm.qk_norm_rope_append`."""
    heads_k, head_dim = keys.shape[1:]
    heads = qkv.unflatten(1, (-1, head_dim))
    q, k, v = heads.split((heads.shape[1] - 2 * heads_k, heads_k, heads_k), dim=1)
    cos, sin = rotation.float().unsqueeze(1).chunk(2, dim=-1)

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        wide = normalized(x, eps)
        if cast_first:
            wide = (wide.to(x.dtype).float() * weight.float()).to(x.dtype).float()
        else:
            wide = wide * weight.float()
        left, right = wide.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)

    keys[slots] = turned(k, weight_k)
    values[slots] = v
    query = turned(q, weight_q)
    if items is None:
        return query
    return query.unflatten(0, (items, -1)).transpose(1, 2).contiguous().transpose(1, 2)


def _reference(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Tensor]:  # noqa: ARG001
    return partial(qk_norm_rope_append, cast_first=facts["attrs.variant"] == "rms_cast")


def _triton(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Tensor]:  # noqa: ARG001
    from phyai.triton import qk_norm

    return partial(qk_norm.qk_norm_rope_append, cast_first=facts["attrs.variant"] == "rms_cast")


def _bench(facts: Facts, device: Any) -> tuple[Any, ...]:
    tokens, head_dim = facts["shape.tokens"], facts["shape.head_dim"]
    heads_q, heads_k = facts["shape.heads_q"], facts["shape.heads_k"]
    dtype = facts["dtype.input"]
    qkv = random_tensor((tokens, (heads_q + 2 * heads_k) * head_dim), dtype, device)
    weight = random_tensor((head_dim,), dtype, device)
    angles = random_tensor((tokens, head_dim // 2), "fp32", device)
    rotation = torch.cat((angles.cos(), angles.sin()), dim=-1)
    keys, values = (random_tensor((tokens, heads_k, head_dim), dtype, device) for _ in range(2))
    slots = torch.arange(tokens, device=device)
    return qkv, weight, weight, rotation, slots, keys, values, 1e-6


def populate(catalog: Catalog) -> None:
    """Declares ``qk_norm_rope_append`` and its rows."""
    catalog.register_op(
        OpSpec(
            name="qk_norm_rope_append",
            dims=("tokens", "head_dim", "heads_q", "heads_k"),
            dtypes=("input",),
            attributes={"variant": FactKind.STR},
            signature=(
                "(qkv, weight_q, weight_k, rotation, slots, keys, values, eps, items=None) -> q"
            ),
            bench_args=_bench,
            doc=(
                "qkv [T, (heads_q + 2 heads_k) head_dim]: each query and key head is divided by "
                "its RMS, multiplied by its weight [head_dim] and rotated by halves by rotation "
                "[T, head_dim], cosines then sines. Keys and values are stored in rows slots [T] "
                "of keys and values [slots, heads_k, head_dim]; returns q [T, heads_q, head_dim], "
                "or for items of a batch [items, T / items, heads_q, head_dim], where the tokens "
                "of a head follow each other in memory. Variant rms multiplies in fp32 and rounds "
                "once; rms_cast rounds before and after the weight."
            ),
        )
    )
    catalog.register(
        Impl(
            kernel_id="triton.qk_norm_rope_append",
            op="qk_norm_rope_append",
            when=all_of(
                one_of("device.vendor", "nvidia", "amd"),
                lib("triton"),
                one_of("dtype.input", "bf16", "fp16", "fp32"),
                one_of("shape.head_dim", 16, 32, 64, 128, 256),
                _VARIANT,
            ),
            prepare=_triton,
            priority=Priority.OPTIMIZED,
            metadata={"package": "triton"},
        )
    )
    catalog.register(
        Impl(
            kernel_id="torch.qk_norm_rope_append",
            op="qk_norm_rope_append",
            when=_VARIANT,
            prepare=_reference,
            priority=Priority.REFERENCE,
            reference=True,
        )
    )
