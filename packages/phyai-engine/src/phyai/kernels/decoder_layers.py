"""The layers of a decoder body as one operation, so that kernels may join across sublayers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import compare, divisible, eq, family_in, is_set, lib, one_of
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.dispatch.predicate import all_of
from phyai.kernels.conditions import NVIDIA, returns

MOST_ROWS = 256
"""Rows up to which a product is bound by its weight, and fusing pays more than larger tiles."""


def _layers(
    decoder: Any,
    x: Tensor,
    place: Any,
    modulations: Sequence[Any],
    final: Tensor | None,  # noqa: ARG001  # fused rows need them
    constants: dict[str, Any],  # noqa: ARG001
) -> Any:
    stream = decoder.run_layers(x, place, modulations)
    return stream.residual, stream.update, stream.gate


def _fused(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Any]:  # noqa: ARG001
    from phyai.kernels.decoder_fused import run_fused

    return run_fused


def _persistent(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Any]:  # noqa: ARG001
    # Fails where Triton has no Gluon, and so leaves the choice to the next row.
    from phyai.kernels.decoder_persistent import run_persistent

    return run_persistent


_FUSED = all_of(
    NVIDIA,
    lib("triton"),
    eq("dtype.input", "bf16"),
    eq("quant.format", "bf16"),
    eq("attrs.adaptive", True, FactKind.BOOL),
    eq("attrs.segments", True, FactKind.BOOL),
    eq("attrs.shared_modulation", True, FactKind.BOOL),
    eq("shape.kv_heads", 1),
    compare("shape.tokens", "<=", MOST_ROWS),
    divisible("shape.hidden", 512),
    divisible("shape.mlp", 512),
    eq("shape.head_dim", 256),
)
_PERSISTENT = all_of(
    family_in("sm9"),
    compare("shape.tokens", "<=", 64),
    one_of("shape.hidden", 512, 1024),
    one_of("shape.heads", 4, 8, 16),
    one_of("shape.mlp", 1024, 2048, 4096),
)


def populate(catalog: Catalog) -> None:
    """Declares ``decoder_layers`` and its rows."""
    catalog.register_op(
        OpSpec(
            name="decoder_layers",
            dims=("tokens", "hidden", "mlp", "heads", "kv_heads", "head_dim"),
            dtypes=("input",),
            attributes={
                "adaptive": FactKind.BOOL,
                "segments": FactKind.BOOL,
                "shared_modulation": FactKind.BOOL,
            },
            signature="(decoder, x, place, modulations, final, constants) -> (x, update, gate)",
            doc=(
                "All layers of a body on packed rows x [T, hidden]; x + gate * update is their "
                "result, where an update of None is nothing. quant is the weight format "
                "that its products share; shared_modulation: one time for all rows; segments: "
                "visible slots are two runs whose lengths lie on the device."
            ),
        )
    )
    catalog.register(
        Impl(
            kernel_id="triton.decoder_layers",
            op="decoder_layers",
            when=all_of(_FUSED, family_in("sm9", "sm10", "sm11", "sm12")),
            prepare=_fused,
            priority=Priority.SPECIALIZED,
            metadata={"package": "triton"},
        )
    )
    catalog.register(
        Impl(
            kernel_id="triton.decoder_layers.persistent",
            op="decoder_layers",
            when=all_of(_FUSED, _PERSISTENT),
            prepare=_persistent,
            # Behind the fused row; a policy chooses it with
            # ``prefer: [triton.decoder_layers.persistent, triton.decoder_layers]``.
            priority=Priority.OPTIMIZED,
            metadata={"package": "triton"},
        )
    )
    catalog.register(
        Impl(
            kernel_id="layers.decoder_layers",
            op="decoder_layers",
            when=is_set("dtype.input"),
            prepare=returns(_layers),
            priority=Priority.REFERENCE,
            reference=True,
        )
    )
