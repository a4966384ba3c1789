"""Activations, plain and gated; the references compute in fp32 and cast back."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import divisible, eq, is_set
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.dispatch.predicate import Predicate, all_of
from phyai.kernels.bench_elementwise import activation_inputs
from phyai.kernels.conditions import FLASHINFER, VECTOR, half, returns


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return functional.relu(x).square()


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": functional.silu,
    "relu2": _relu2,
}
_FLASHINFER = ("gelu", "gelu_tanh", "silu")


def _plain(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        return function(x.float()).to(x.dtype)

    return run


def _gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return (function(left.float()) * right.float()).to(x.dtype)

    return run


def _flashinfer(name: str) -> Callable[..., Any]:
    def prepare(facts: Facts, params: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:  # noqa: ARG001
        from flashinfer import activation

        kernel = getattr(activation, name)

        def run(x: Tensor) -> Tensor:
            return kernel(x.contiguous())

        return run

    return prepare


def _is(activation: str, *, gated: bool) -> Predicate:
    return all_of(
        eq("attrs.gated", gated, FactKind.BOOL),
        eq("attrs.activation", activation, FactKind.STR),
    )


def populate(catalog: Catalog) -> None:
    """Declares ``activation`` and its rows."""
    catalog.register_op(
        OpSpec(
            name="activation",
            dims=("tokens", "hidden"),
            dtypes=("input",),
            attributes={"activation": FactKind.STR, "gated": FactKind.BOOL},
            signature="(x) -> Tensor",
            bench_args=activation_inputs,
            doc="act(x), or for gated input [left | right]: act(left) * right.",
        )
    )
    for name, function in _FUNCTIONS.items():
        fused = f"{name}_and_mul"
        if name in _FLASHINFER:
            catalog.register(
                Impl(
                    kernel_id=f"flashinfer.activation.{fused}",
                    op="activation",
                    when=all_of(
                        FLASHINFER,
                        _is(name, gated=True),
                        half("input"),
                        divisible("shape.hidden", VECTOR),
                    ),
                    prepare=_flashinfer(fused),
                    priority=Priority.OPTIMIZED + 2,
                    metadata={"package": "flashinfer-python"},
                )
            )
        for kernel_id, gated, run in (
            (f"torch.activation.{name}", False, _plain(function)),
            (f"torch.activation.{fused}", True, _gated(function)),
        ):
            catalog.register(
                Impl(
                    kernel_id=kernel_id,
                    op="activation",
                    when=all_of(_is(name, gated=gated), is_set("dtype.input")),
                    prepare=returns(run),
                    priority=Priority.REFERENCE,
                    reference=True,
                )
            )
