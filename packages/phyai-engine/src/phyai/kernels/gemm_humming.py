"""Humming's matrix products with packed INT4, INT8, FP8, MXFP4 and NVFP4 weights.

A layer must have been prepared for Humming when its weights were loaded: it then holds
``humming_config`` and packed tensors. Choosing a row does not convert weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import at_least, divisible, eq, lib, one_of, same
from phyai.dispatch.facts import Facts
from phyai.dispatch.opspec import Impl, Priority
from phyai.dispatch.predicate import Predicate, all_of, any_of
from phyai.kernels.conditions import NVIDIA
from phyai.kernels.humming_params import check_params
from phyai.kernels.humming_product import Options, multiply

_FORMAT, _ACTIVATION = "quant.format", "quant.fields.activation"

_HUMMING = all_of(
    NVIDIA,
    eq("quant.layout", "humming"),
    same("dtype.input", "dtype.output"),
    any_of(
        all_of(eq("dtype.input", "fp16"), at_least("sm75")),
        all_of(eq("dtype.input", "bf16"), at_least("sm80")),
    ),
    divisible("shape.N", 64),
    divisible("shape.K", 32),
    lib("humming"),
)
_A16 = eq(_ACTIVATION, "a16")
_A8 = all_of(
    any_of(
        eq(_ACTIVATION, "int8"),
        all_of(one_of(_ACTIVATION, "fp8_e4m3", "fp8_e5m2"), at_least("sm89")),
    ),
    divisible("shape.K", 64),
)

_ROWS: dict[str, Predicate] = {
    "w4a16": all_of(eq(_FORMAT, "int4"), _A16),
    "w8a16": all_of(eq(_FORMAT, "int8"), _A16),
    "fp8_a16": all_of(one_of(_FORMAT, "fp8_e4m3", "fp8_e5m2"), _A16),
    "mxfp4_a16": all_of(eq(_FORMAT, "mxfp4"), _A16, eq("dtype.output", "bf16")),
    "nvfp4_a16": all_of(eq(_FORMAT, "nvfp4"), _A16),
    "fp8_a8": all_of(
        any_of(
            all_of(eq(_FORMAT, "fp8_e4m3"), eq(_ACTIVATION, "fp8_e4m3")),
            all_of(
                eq(_FORMAT, "fp8_e5m2"), eq(_ACTIVATION, "fp8_e5m2"), eq("dtype.output", "bf16")
            ),
        ),
        _A8,
    ),
    "int8_a8": all_of(eq(_FORMAT, "int8"), eq(_ACTIVATION, "int8"), _A8),
    "int4_a8": all_of(eq(_FORMAT, "int4"), one_of(_ACTIVATION, "int8", "fp8_e4m3"), _A8),
}


def _prepare(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Tensor]:
    options = Options(params.get("compute_config", {}), params.get("tuning_config"))

    def run(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if rows.shape[0] == 0:
            return x.new_zeros((*x.shape[:-1], facts["shape.N"]))
        out = multiply(layer, rows, options)
        if bias is not None:
            out = out + bias
        return out.view(*x.shape[:-1], out.shape[-1])

    return run


def register(catalog: Catalog) -> None:
    """Adds the ``humming.gemm.*`` rows."""
    for name, condition in _ROWS.items():
        catalog.register(
            Impl(
                kernel_id=f"humming.gemm.{name}",
                op="gemm",
                when=all_of(_HUMMING, condition),
                prepare=_prepare,
                priority=Priority.SPECIALIZED,
                accepts=("compute_config", "tuning_config"),
                check_params=check_params,
                metadata={"package": "humming-kernels"},
            )
        )
