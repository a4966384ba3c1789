"""piper-kernels' attention in 8 bits as rows of ``attention``.

They change the result, so they run only where a policy rule names them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import compare, eq, lib, one_of
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.opspec import Impl, Priority
from phyai.dispatch.predicate import Predicate, all_of
from phyai.kernels.conditions import half

KEEP_RATIO = 0.3
"""Share of the key blocks that sparse attention keeps unless a policy says another."""

BLOCK = 64
"""Rows of a block that sparse attention routes."""

Attention = Callable[..., Tensor]


def rows_of_groups(q: Tensor, kv_heads: int) -> Tensor | None:
    """Returns queries of heads that share keys as rows of one head [B, kv_heads, rows, head_dim].

    Without a mask the order of rows is free, and fewer, longer heads fill the tiles of a kernel
    better. Queries [B, S, heads, head_dim] whose tokens do not follow each other in memory within
    a head, or that share no keys, give None.
    """
    batch, tokens, heads, width = q.shape
    heads_first = q.transpose(1, 2)
    if heads == kv_heads or not heads_first.is_contiguous():
        return None
    return heads_first.view(batch, kv_heads, heads // kv_heads * tokens, width)


def heads_of_rows(rows: Tensor, q: Tensor) -> Tensor:
    """Returns what attention made of `rows_of_groups`, as queries are: [B, S, heads, head_dim]."""
    batch, tokens, heads, width = q.shape
    return rows.reshape(batch, heads, tokens, width).transpose(1, 2)


def _prepare_piper(facts: Facts, params: Mapping[str, Any]) -> Attention:  # noqa: ARG001
    from piper_kernels import piper_attention

    def run(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False) -> Tensor:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        rows = None if causal else rows_of_groups(q, k.shape[1])
        if rows is not None:
            return heads_of_rows(piper_attention(rows, k, v, scale=scale), q)
        out = piper_attention(q.transpose(1, 2), k, v, scale=scale, is_causal=causal)
        return out.transpose(1, 2)

    return run


def _prepare_sage(facts: Facts, params: Mapping[str, Any]) -> Attention:  # noqa: ARG001
    from piper_kernels import sage_attention_2pp

    def run(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False) -> Tensor:
        group = q.shape[2] // k.shape[2]
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if causal:
            k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
            out = sage_attention_2pp(q.transpose(1, 2), k, v, scale=scale, is_causal=True)
            return out.transpose(1, 2)
        rows = rows_of_groups(q, k.shape[1])
        if rows is not None:
            return heads_of_rows(sage_attention_2pp(rows, k, v, scale=scale), q)
        rows = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)
        out = sage_attention_2pp(rows.flatten(2, 3), k, v, scale=scale)
        return out.view(rows.shape).permute(0, 3, 1, 2, 4).flatten(2, 3)

    return run


def _prepare_sparse(facts: Facts, params: Mapping[str, Any]) -> Attention:
    from piper_kernels import SparsePiperAttention

    ratio = params.get("keep_ratio", KEEP_RATIO)
    routing = params.get("routing", "minmax")
    attend = SparsePiperAttention([ratio] * facts["shape.heads"], routing=routing)

    def run(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        batch, rows, heads, width = q.shape
        more = k.shape[1] - rows
        if more:  # the first keys, such as a text's, have no query: every row sees all of them
            q = torch.cat((q, q.new_zeros(batch, more, heads, width)), dim=1)
            k, v = (torch.cat((x[:, more:], x[:, :more]), dim=1) for x in (k, v))
        out = attend(q, k, v, sparse_key_blocks=rows // BLOCK, scale=scale)
        return out[:, :rows]

    return run


def _check_sparse(params: Mapping[str, Any]) -> None:
    ratio, routing = params.get("keep_ratio", KEEP_RATIO), params.get("routing", "minmax")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 1e-6 <= ratio <= 1:
        raise ValueError(f"keep_ratio is {ratio!r}; allowed: numbers from 0.000001 to 1")
    if routing not in ("minmax", "mean"):
        raise ValueError(f"routing is {routing!r}; allowed: minmax, mean")


def register(catalog: Catalog, plain: Predicate) -> None:
    """Adds the ``piper.attention`` rows.

    Args:
        catalog: has the operation ``attention``.
        plain: that a call has no mask, window or cap.
    """
    common = all_of(
        one_of("device.vendor", "nvidia", "amd"),
        lib("piper_kernels"),
        lib("triton"),
        eq("attrs.layout", "padded", FactKind.STR),
        half("input", "key", "value"),
        one_of("shape.head_dim", 64, 128),
        plain,
    )
    blocks = all_of(
        common,
        eq("attrs.causal", False, FactKind.BOOL),
        compare("shape.tokens", ">=", BLOCK),
    )
    for name, when, prepare, accepts in (
        ("", common, _prepare_piper, ()),
        (".sage", common, _prepare_sage, ()),
        (".sparse", blocks, _prepare_sparse, ("keep_ratio", "routing")),
    ):
        catalog.register(
            Impl(
                kernel_id=f"piper.attention{name}",
                op="attention",
                when=when,
                prepare=prepare,
                priority=Priority.GENERAL,
                explicit=True,
                accepts=accepts,
                check_params=_check_sparse if accepts else None,
                metadata={"package": "piper-kernels"},
            )
        )
