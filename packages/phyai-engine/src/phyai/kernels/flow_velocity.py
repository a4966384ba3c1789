"""The end of an Euler step as one operation: the expert's final norm and the action head."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import compare, eq, is_set, lib, one_of
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.dispatch.predicate import all_of
from phyai.kernels.conditions import NVIDIA, returns


def _layers(norm: Any, projection: Any, x: Tensor, modulation: Tensor) -> Tensor:
    return projection(norm(x, modulation)[0].float())


def _fused(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Tensor]:  # noqa: ARG001
    from phyai.triton.flow_velocity import flow_velocity

    return lambda norm, projection, x, modulation: flow_velocity(
        x, modulation, projection.weight, projection.bias, norm.eps
    )


def populate(catalog: Catalog) -> None:
    """Declares ``flow_velocity`` and its rows."""
    catalog.register_op(
        OpSpec(
            name="flow_velocity",
            dims=("tokens", "hidden", "actions"),
            dtypes=("input", "weight"),
            attributes={"shared_modulation": FactKind.BOOL},
            signature="(norm, projection, x, modulation) -> Tensor",
            doc=(
                "projection(norm(x)) [T, actions] in fp32 of rows x [T, hidden]: norm is adaptive, "
                "its modulation [1 or T, 3 * hidden] is fp32; shared_modulation: one for all rows. "
                "quant is the projection's format."
            ),
        )
    )
    catalog.register(
        Impl(
            kernel_id="layers.flow_velocity",
            op="flow_velocity",
            when=is_set("dtype.input"),
            prepare=returns(_layers),
            priority=Priority.REFERENCE,
            reference=True,
        )
    )
    catalog.register(
        Impl(
            kernel_id="triton.flow_velocity",
            op="flow_velocity",
            when=all_of(
                NVIDIA,
                lib("triton"),
                one_of("dtype.input", "bf16", "fp16"),
                eq("dtype.weight", "fp32"),
                one_of("quant.format", "bf16", "fp16"),
                eq("attrs.shared_modulation", True, FactKind.BOOL),
                compare("shape.hidden", "<=", 8192),
            ),
            prepare=_fused,
            priority=Priority.OPTIMIZED,
            metadata={"package": "triton"},
        )
    )
