"""Attention of packed query rows to cache pages, without a causal mask."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import eq, is_set, lib, one_of
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.dispatch.predicate import ALWAYS, Predicate, all_of
from phyai.kernels.attention import BLACKWELL, HOPPER, register_flashinfer
from phyai.kernels.conditions import FLASHINFER, HEAD_DIMS, half, returns

if TYPE_CHECKING:
    from phyai.runtime.paged import PagedPlan

BACKENDS: dict[str, Predicate] = {
    "fa2": ALWAYS,
    "fa3": HOPPER,
    "cudnn": lib("cudnn"),
    "trtllm-gen": BLACKWELL,
}
"""FlashInfer's kernels for paged caches and what they need beyond the common condition."""


def _attention_paged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: "PagedPlan", *, scale: float
) -> Tensor:
    page_size, kv_heads, head_dim = k_pages.shape[1:]
    outputs: list[Tensor] = []
    row = page = 0
    for rows, keys in zip(plan.qo_lens, plan.kv_lens, strict=True):
        pages = -(-keys // page_size)
        listed = plan.kv_indices[page : page + pages]
        k = k_pages[listed].reshape(-1, kv_heads, head_dim)[:keys]
        v = v_pages[listed].reshape(-1, kv_heads, head_dim)[:keys]
        outputs.append(_one_request(q[row : row + rows], k, v, scale))
        row, page = row + rows, page + pages
    return torch.cat(outputs) if outputs else torch.zeros_like(q)


def _one_request(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attends q [T, heads, D] to k, v [keys, kv_heads, D]; a group's heads share one matmul."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.float().view(rows, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    flat = grouped.reshape(kv_heads, -1, head_dim) * scale
    weights = torch.bmm(flat, k.float().permute(1, 2, 0)).softmax(dim=-1)
    out = torch.bmm(weights, v.float().transpose(0, 1))
    out = out.view(kv_heads, heads // kv_heads, rows, head_dim).permute(2, 0, 1, 3)
    return out.reshape(rows, heads, head_dim).to(q.dtype)


def _flashinfer(backend: str) -> Callable[..., Any]:
    def prepare(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Tensor]:  # noqa: ARG001
        from phyai.kernels.flashinfer_attention import paged_runner

        return paged_runner(params.get("prefill_backend", backend))

    return prepare


def populate(catalog: Catalog) -> None:
    """Declares ``attention_paged`` and its rows."""
    catalog.register_op(
        OpSpec(
            name="attention_paged",
            dims=("tokens", "heads", "kv_heads", "head_dim"),
            dtypes=("input",),
            optional_dtypes=("output",),
            attributes={"layout": FactKind.STR, "causal": FactKind.BOOL},
            optional_attributes={"layer_id": FactKind.INT, "runner": FactKind.STR},
            signature="(q, k_pages, v_pages, plan, *, scale) -> Tensor",
            doc=(
                "q [T, heads, head_dim], pages [P, page_size, kv_heads, head_dim]; request r of "
                "the plan attends with its query rows to the keys of its pages."
            ),
        )
    )
    paged = all_of(
        eq("attrs.layout", "paged", FactKind.STR), eq("attrs.causal", False, FactKind.BOOL)
    )
    flashinfer = all_of(FLASHINFER, paged, one_of("shape.head_dim", *HEAD_DIMS), half("input"))
    register_flashinfer(catalog, "attention_paged", BACKENDS, flashinfer, _flashinfer)
    catalog.register(
        Impl(
            kernel_id="eager.attention_paged",
            op="attention_paged",
            when=all_of(paged, is_set("dtype.input")),
            prepare=returns(_attention_paged),
            priority=Priority.REFERENCE,
            reference=True,
        )
    )
