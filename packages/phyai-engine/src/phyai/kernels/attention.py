"""Attention without a cache, on padded batches or on packed rows of requests of any lengths."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import (
    compare,
    divisible,
    eq,
    family_in,
    is_none,
    is_set,
    lib,
    one_of,
)
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.dispatch.predicate import ALWAYS, Predicate, all_of
from phyai.kernels import attention_piper
from phyai.kernels.attention_piper import heads_of_rows, rows_of_groups
from phyai.kernels.conditions import FLASHINFER, HEAD_DIMS, NVIDIA, VECTOR, half, returns

HOPPER = family_in("sm9")
BLACKWELL = family_in("sm10", "sm11")

BACKENDS: dict[str, Predicate] = {
    "fa2": ALWAYS,
    "fa3": HOPPER,
    "cudnn": lib("cudnn"),
    "cutlass": BLACKWELL,
    "cute-dsl": ALWAYS,
}
"""FlashInfer's kernels for ragged batches and what they need beyond the common condition."""

PLAIN = all_of(
    is_none("attrs.sliding_window"),
    is_none("attrs.logits_soft_cap"),
    one_of("attrs.mask_kind", None, "none", kind=FactKind.STR),
    one_of("attrs.masked", None, False, kind=FactKind.BOOL),
)
"""The calling convention has no mask, window or cap."""


def _attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False) -> Tensor:
    batch, rows, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    grouped = q.float().view(batch, rows, kv_heads, heads // kv_heads, head_dim)
    logits = torch.einsum("bqhgd,bkhd->bhgqk", grouped, k.float()) * scale
    if causal:
        # The last query sees the last key, and queries before the first key see none: zeros.
        order = torch.arange(keys, device=q.device) - (keys - rows)
        future = order > torch.arange(rows, device=q.device).unsqueeze(-1)
        logits = logits.masked_fill(future, torch.finfo(logits.dtype).min)
        weights = logits.softmax(dim=-1).masked_fill(future, 0.0)
    else:
        weights = logits.softmax(dim=-1)
    out = torch.einsum("bhgqk,bkhd->bqhgd", weights, v.float())
    return out.reshape(q.shape).to(q.dtype)


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    lens: tuple[int, ...] | None = None,
    kv_lens: tuple[int, ...] | None = None,
) -> Tensor:
    if lens is None:
        return _attention(q, k, v, scale=scale, causal=causal)
    keys = [*(lens if kv_lens is None else kv_lens)]
    requests = zip(q.split([*lens]), k.split(keys), v.split(keys), strict=True)
    return torch.cat(
        [
            _attention(*(part[None] for part in request), scale=scale, causal=causal)[0]
            for request in requests
        ]
    )


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False) -> Tensor:
    if causal and q.shape[1] != k.shape[1]:
        return _attention(q, k, v, scale=scale, causal=True)
    rows = None if causal else rows_of_groups(q, k.shape[2])
    if rows is not None:
        out = functional.scaled_dot_product_attention(
            rows, k.transpose(1, 2), v.transpose(1, 2), scale=scale
        )
        return heads_of_rows(out, q)
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        scale=scale,
        is_causal=causal,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


SDPA_BACKENDS = ("auto", "cudnn", "flash", "efficient")
"""Kernels of PyTorch that a policy may prefer; the others follow where it cannot run."""


def _prepare_sdpa(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Tensor]:  # noqa: ARG001
    name = params.get("sdpa_backend", "auto")
    if name == "auto":
        return _sdpa
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    order = [kernels.pop(name), *kernels.values(), SDPBackend.MATH]

    def run(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False) -> Tensor:
        with sdpa_kernel(order, set_priority=True):
            return _sdpa(q, k, v, scale=scale, causal=causal)

    return run


def _check_sdpa(params: Mapping[str, Any]) -> None:
    name = params.get("sdpa_backend", "auto")
    if name not in SDPA_BACKENDS:
        raise ValueError(f"sdpa_backend is {name!r}; allowed: {', '.join(SDPA_BACKENDS)}")


def _narrow(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Tensor]:  # noqa: ARG001
    from phyai.triton.narrow_attention import narrow_attention

    def run(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        return narrow_attention(q, k, v, scale=scale)

    return run


def _flashinfer(backend: str) -> Callable[..., Any]:
    def prepare(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Tensor]:  # noqa: ARG001
        from phyai.kernels.flashinfer_attention import ragged_runner

        return ragged_runner(params.get("prefill_backend", backend))

    return prepare


def _check_backend(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], None]:
    """Makes the check of the param ``prefill_backend``."""

    def check(params: Mapping[str, Any]) -> None:
        name = params.get("prefill_backend", "auto")
        if name not in names:
            raise ValueError(f"prefill_backend is {name!r}; allowed: {', '.join(names)}")

    return check


_SPEC = OpSpec(
    name="attention",
    dims=("tokens", "heads", "kv_heads", "head_dim"),
    optional_dims=("kv_tokens",),
    dtypes=("input",),
    optional_dtypes=("key", "value"),
    attributes={"layout": FactKind.STR, "causal": FactKind.BOOL},
    optional_attributes={
        "layer_id": FactKind.INT,
        "sliding_window": FactKind.INT,
        "logits_soft_cap": FactKind.ANY,
        "mask_kind": FactKind.STR,
        "masked": FactKind.BOOL,
    },
    signature="(q, k, v, *, scale, causal=False, lens=None, kv_lens=None) -> Tensor",
    doc=(
        "softmax(q k^T * scale) v; layout padded: q [B, S, heads, head_dim], k and v "
        "[B, S2, kv_heads, head_dim]; layout ragged: q [T, heads, head_dim] packs requests of "
        "lens rows, k and v [T2, kv_heads, head_dim] of kv_lens rows, those of lens if None; "
        "both are tuples on the host. heads is a multiple of kv_heads. Causal aligns the last "
        "query of a request with its last key; a query that sees no key gets zeros."
    ),
)


def register_flashinfer(
    catalog: Catalog,
    op: str,
    backends: Mapping[str, Predicate],
    when: Predicate,
    prepare: Callable[[str], Callable[..., Any]],
) -> None:
    """Adds FlashInfer's rows of an operation: one that leaves it the choice, one for each backend.

    Args:
        catalog: where they go.
        op: operation.
        backends: FlashInfer's names, and what each needs beyond ``when``.
        when: what all of them need.
        prepare: makes the ``prepare`` of a backend.
    """
    names = ("auto", *backends)
    for backend in names:
        variant = backends.get(backend, ALWAYS)
        suffix, offset = ("", 2) if backend == "auto" else (f".{backend}", 1)
        catalog.register(
            Impl(
                kernel_id=f"flashinfer.{op}{suffix}",
                op=op,
                when=when if variant is ALWAYS else all_of(when, variant),
                prepare=prepare(backend),
                priority=Priority.OPTIMIZED + offset,
                accepts=("prefill_backend",),
                check_params=_check_backend(names),
                metadata={"package": "flashinfer-python"},
            )
        )


def populate(catalog: Catalog) -> None:
    """Declares ``attention`` and its rows."""
    catalog.register_op(_SPEC)
    padded = eq("attrs.layout", "padded", FactKind.STR)
    either = one_of("attrs.layout", "padded", "ragged", kind=FactKind.STR)
    nothing_special = all_of(
        FLASHINFER,
        either,
        one_of("shape.head_dim", *HEAD_DIMS),
        half("input", "key", "value"),
        PLAIN,
    )
    register_flashinfer(catalog, "attention", BACKENDS, nothing_special, _flashinfer)
    catalog.register(
        Impl(
            kernel_id="sdpa.attention",
            op="attention",
            when=all_of(padded, is_set("dtype.input"), PLAIN),
            prepare=_prepare_sdpa,
            priority=Priority.OPTIMIZED,
            accepts=("sdpa_backend",),
            check_params=_check_sdpa,
        )
    )
    catalog.register(
        Impl(
            kernel_id="triton.attention.narrow",
            op="attention",
            when=all_of(
                NVIDIA,
                lib("triton"),
                padded,
                eq("attrs.causal", False, FactKind.BOOL),
                half("input", "key", "value"),
                compare("shape.head_dim", ">=", 32),
                compare("shape.head_dim", "<=", 128),
                divisible("shape.head_dim", VECTOR),
                PLAIN,
            ),
            prepare=_narrow,
            priority=Priority.GENERAL,
            metadata={"package": "triton"},
        )
    )
    catalog.register(
        Impl(
            kernel_id="eager.attention",
            op="attention",
            when=all_of(either, is_set("dtype.input"), PLAIN),
            prepare=returns(_eager),
            priority=Priority.REFERENCE,
            reference=True,
        )
    )
    attention_piper.register(catalog, PLAIN)
