"""Modulation of a token sequence by a per-item scale and shift."""

from torch import Tensor

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import is_set
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.kernels.bench_elementwise import modulate_inputs
from phyai.kernels.conditions import returns


def _modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    if scale.ndim == x.ndim - 1:
        scale, shift = scale.unsqueeze(-2), shift.unsqueeze(-2)
    return (x * (1 + scale) + shift).to(x.dtype)


def populate(catalog: Catalog) -> None:
    """Declares ``modulate`` and its row."""
    catalog.register_op(
        OpSpec(
            name="modulate",
            dims=("batch", "tokens", "hidden"),
            dtypes=("input", "shift", "scale"),
            signature="(x, scale, shift) -> Tensor",
            bench_args=modulate_inputs,
            doc=(
                "x * (1 + scale) + shift, rounded after each step; x [batch, tokens, hidden], "
                "scale and shift [batch, hidden] or broadcastable to x."
            ),
        )
    )
    catalog.register(
        Impl(
            kernel_id="torch.modulate",
            op="modulate",
            when=is_set("dtype.input"),
            prepare=returns(_modulate),
            priority=Priority.REFERENCE,
            reference=True,
        )
    )
