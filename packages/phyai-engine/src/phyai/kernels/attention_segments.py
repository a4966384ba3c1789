"""Attention of packed query rows to two runs of cache slots a request, lengths on the device."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import compare, eq, family_in, is_set, lib, one_of
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.dispatch.predicate import all_of
from phyai.kernels.conditions import NVIDIA, half, returns

if TYPE_CHECKING:
    from phyai.runtime.segments import SegmentPlan


def attention_segments(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: "SegmentPlan", *, scale: float
) -> Tensor:
    """The reference: every row against every slot in fp32, masked on the device."""
    rows, heads, head_dim = q.shape
    slots, _, kv_heads, _ = k_pages.shape
    table = plan.table
    row = torch.arange(rows, device=q.device)[:, None]
    slot = torch.arange(slots, device=q.device)[:, None]

    def run(index: Tensor, first: int) -> Tensor:
        start = table[:, first]
        return (index >= start) & (index < start + table[:, first + 1])

    visible = run(slot, 2) | run(slot, 4)
    mask = (run(row, 0).float() @ visible.float().T) > 0
    unseen = ~visible.any(1)
    grouped = q.float().view(rows, kv_heads, heads // kv_heads, head_dim)
    # Slots that nobody sees may hold anything, not-a-numbers too.
    keys = k_pages.flatten(0, 1).float().masked_fill(unseen[:, None, None], 0.0)
    values = v_pages.flatten(0, 1).float().masked_fill(unseen[:, None, None], 0.0)
    logits = torch.einsum("qhgd,khd->hgqk", grouped, keys) * scale
    logits = logits.masked_fill(~mask, torch.finfo(torch.float32).min)
    weights = logits.softmax(-1) * mask
    out = torch.einsum("hgqk,khd->qhgd", weights, values)
    return out.reshape(q.shape).to(q.dtype)


def _triton(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Tensor]:  # noqa: ARG001
    from phyai.triton.segments import attend

    return attend


def _hopper(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Tensor]:  # noqa: ARG001
    # Fails where Triton has no Gluon, and so leaves the choice to the next row.
    from phyai.triton.segments_hopper import attend_hopper

    return attend_hopper


MANY_ROWS = 256
"""Query tokens from which on tiles of 64 (token, head) rows can fill a device."""


_SPEC = OpSpec(
    name="attention_segments",
    dims=("tokens", "heads", "kv_heads", "head_dim"),
    dtypes=("input",),
    optional_dtypes=("output",),
    attributes={"layer_id": FactKind.INT},
    signature="(q, k_pages, v_pages, plan, *, scale) -> Tensor",
    doc=(
        "q [T, heads, head_dim], pages [P, 1, kv_heads, head_dim]; the rows of group g "
        "attend to the two runs of slots in plan.table[g], which is read on the device. "
        "Rows of no group are undefined."
    ),
)


def populate(catalog: Catalog) -> None:
    """Declares ``attention_segments`` and its rows."""
    catalog.register_op(_SPEC)
    catalog.register(
        Impl(
            kernel_id="triton.attention_segments",
            op="attention_segments",
            when=all_of(
                NVIDIA,
                lib("triton"),
                half("input"),
                one_of("shape.head_dim", 16, 32, 64, 128, 256),
                compare("shape.heads", ">=", 1),
            ),
            prepare=_triton,
            priority=Priority.OPTIMIZED,
            metadata={"package": "triton"},
        )
    )
    catalog.register(
        Impl(
            kernel_id="triton.attention_segments.hopper",
            op="attention_segments",
            when=all_of(
                NVIDIA,
                family_in("sm9"),
                lib("triton"),
                eq("dtype.input", "bf16"),
                eq("shape.head_dim", 256),
                eq("shape.kv_heads", 1),
                compare("shape.heads", ">=", 1),
                compare("shape.tokens", ">=", MANY_ROWS),
            ),
            prepare=_hopper,
            # Behind the row above, which runs on every device: a policy prefers this one.
            priority=Priority.GENERAL,
            metadata={"package": "triton"},
        )
    )
    catalog.register(
        Impl(
            kernel_id="torch.attention_segments",
            op="attention_segments",
            when=is_set("dtype.input"),
            prepare=returns(attention_segments),
            priority=Priority.REFERENCE,
            reference=True,
        )
    )
