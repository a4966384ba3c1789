"""The rows that this package adds to the catalog.

This module is imported whenever a catalog is built, on machines without a GPU too, so it imports
nothing heavy; a kernel's library is imported when a row is prepared.
"""

from collections.abc import Callable, Mapping
from typing import Any

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import one_of
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.opspec import Impl, ParamContract, Priority
from phyai.dispatch.predicate import all_of

ACCUMULATE = ("fp32", "fp64")


def check_params(params: Mapping[str, Any]) -> None:
    """Raises ValueError for values that policies may not pass."""
    accumulate = params.get("accumulate", "fp32")
    if accumulate not in ACCUMULATE:
        raise ValueError(f"accumulate is {accumulate!r}; allowed: {', '.join(ACCUMULATE)}")


def prepare(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the kernel for one kind of call; runs once for each, not at every call."""
    import torch
    from torch.nn import functional

    wide = torch.float64 if params.get("accumulate") == "fp64" else torch.float32
    one = 1.0 if facts["attrs.variant"] == "gemma" else 0.0

    def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = weight.to(wide) + one
        return functional.rms_norm(x.to(wide), scale.shape, scale, eps).to(x.dtype)

    return rmsnorm


def populate(catalog: Catalog) -> None:
    """Adds ``example.rmsnorm``: PyTorch's fused RMS norm."""
    catalog.register(
        Impl(
            kernel_id="example.rmsnorm",
            op="rmsnorm",
            when=all_of(
                one_of("dtype.input", "bf16", "fp16", "fp32"),
                one_of("attrs.variant", "rms", "gemma", kind=FactKind.STR),
            ),
            prepare=prepare,
            priority=Priority.PLUGIN,
            params={"weight": ParamContract.any_float()},
            accepts=("accumulate",),
            check_params=check_params,
        )
    )
