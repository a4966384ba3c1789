"""A fused gate/up projection and its gated activation as one operation.

The layers are the default, because the fused row leaves out the rounding between them and runs on
Hopper only. A policy chooses it with
``{match: {op: gated_product}, prefer: triton.gated_product}``.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import compare, divisible, eq, family_in, is_set, lib, one_of
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.dispatch.predicate import all_of
from phyai.kernels.conditions import NVIDIA, returns

LEAST_ROWS = 256
"""Rows from which a product is bound by the matrix units and tiles of 128 rows are full."""


def _layers(projection: Any, activation: Any, x: Tensor) -> Tensor:
    return activation(projection(x))


def _fused(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Tensor]:  # noqa: ARG001
    # Fails where Triton has no Gluon, and so leaves the choice to the next row.
    from phyai.triton.gated_product import gated_product

    kind = facts["attrs.activation"]
    return lambda projection, activation, x: gated_product(x, projection.weight, kind)  # noqa: ARG005


def populate(catalog: Catalog) -> None:
    """Declares ``gated_product`` and its rows."""
    catalog.register_op(
        OpSpec(
            name="gated_product",
            dims=("M", "K", "hidden"),
            dtypes=("input", "output", "weight"),
            attributes={"activation": FactKind.STR},
            signature="(projection, activation, x) -> Tensor",
            doc=(
                "act(gate(x)) * up(x) [..., hidden] of x [..., K]: projection holds both weights "
                "as [gate; up] without biases, activation is the gated one behind it."
            ),
        )
    )
    catalog.register(
        Impl(
            kernel_id="layers.gated_product",
            op="gated_product",
            when=is_set("dtype.input"),
            prepare=returns(_layers),
            # Before the fused row, which runs where a policy prefers it.
            priority=Priority.OPTIMIZED,
            reference=True,
        )
    )
    catalog.register(
        Impl(
            kernel_id="triton.gated_product",
            op="gated_product",
            when=all_of(
                NVIDIA,
                family_in("sm9"),
                lib("triton"),
                eq("quant.format", "bf16"),
                eq("dtype.input", "bf16"),
                eq("dtype.weight", "bf16"),
                one_of("attrs.activation", "gelu_tanh", "silu", kind=FactKind.STR),
                compare("shape.M", ">=", LEAST_ROWS),
                divisible("shape.K", 64),
                divisible("shape.hidden", 128),
            ),
            prepare=_fused,
            priority=Priority.GENERAL,
            metadata={"package": "triton"},
        )
    )
