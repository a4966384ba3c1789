"""Attention of several requests as rows of one matrix, which the projection behind it reads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import is_set, lib, one_of
from phyai.dispatch.facts import Facts
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.dispatch.predicate import all_of
from phyai.kernels.bench import random_tensor
from phyai.kernels.conditions import returns


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten(1) for part in parts])


def _triton(facts: Facts, params: Any) -> Any:  # noqa: ARG001
    from phyai.triton.join_heads import join_heads

    return join_heads


def _bench(facts: Facts, device: Any) -> tuple[Any, ...]:
    shape = tuple(facts[f"shape.{name}"] for name in ("heads", "tokens", "head_dim"))
    return ([random_tensor(shape, facts["dtype.input"], device).transpose(0, 1)],)


def populate(catalog: Catalog) -> None:
    """Declares ``join_heads`` and its rows."""
    catalog.register_op(
        OpSpec(
            name="join_heads",
            dims=("tokens", "heads", "head_dim"),
            dtypes=("input",),
            signature="(parts) -> Tensor",
            bench_args=_bench,
            doc=(
                "parts: tensors [T, heads, head_dim] with features side by side, otherwise of any "
                "strides, tokens rows in all; returns [tokens, heads * head_dim], contiguous."
            ),
        )
    )
    catalog.register(
        Impl(
            kernel_id="triton.join_heads",
            op="join_heads",
            when=all_of(
                one_of("device.vendor", "nvidia", "amd"),
                lib("triton"),
                one_of("dtype.input", "bf16", "fp16", "fp32"),
                one_of("shape.head_dim", 16, 32, 64, 128, 256),
            ),
            prepare=_triton,
            priority=Priority.OPTIMIZED,
            metadata={"package": "triton"},
        )
    )
    catalog.register(
        Impl(
            kernel_id="torch.join_heads",
            op="join_heads",
            when=is_set("dtype.input"),
            prepare=returns(_join),
            priority=Priority.REFERENCE,
            reference=True,
        )
    )
