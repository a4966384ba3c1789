"""cuBLAS and CUTLASS products of FP8 rows, with the input rounded by one kernel."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import at_least, divisible, eq, is_none, lib, one_of
from phyai.dispatch.facts import Facts
from phyai.dispatch.opspec import Impl, Priority
from phyai.dispatch.predicate import all_of
from phyai.kernels.conditions import NVIDIA
from phyai.kernels.fp8_rows import Fp8Rows

Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
Product = Callable[[Any, Tensor | Fp8Rows, Tensor | None], Tensor]


def scaled_product(
    layer: Any, codes: Tensor, scales: Tensor, bias: Tensor | None, *, fast: bool
) -> Tensor:
    """Returns the product of FP8 rows in bf16.

    Args:
        layer: holds ``weight`` float8 [N, K] and ``weight_scale`` fp32 [N].
        codes: float8 [M, K].
        scales: fp32 [M].
        bias: [N] or None; in bf16 it is added to the sums before they are rounded.
        fast: whether sums over K may stay in the matrix unit's own precision.
    """
    inside = bias is not None and bias.dtype == torch.bfloat16
    out = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        codes,
        layer.weight.t(),
        scale_a=scales.unsqueeze(1),
        scale_b=layer.weight_scale.unsqueeze(0),
        bias=bias if inside else None,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return out if bias is None or inside else out + bias


def product(quantize: Quantize, *, fast: bool) -> Product:
    """Makes the callable of a row from the function that rounds inputs that are not rounded yet."""

    def run(layer: Any, x: Tensor | Fp8Rows, bias: Tensor | None) -> Tensor:
        rows = layer.weight.shape[0]
        if x.numel() == 0:
            return torch.zeros((*x.shape[:-1], rows), dtype=x.dtype, device=x.device)
        codes, scales = (x.codes, x.scales) if isinstance(x, Fp8Rows) else quantize(x)
        out = scaled_product(layer, codes, scales, bias, fast=fast)
        return out.view(*x.shape[:-1], rows)

    return run


def _prepare(facts: Facts, params: Mapping[str, Any]) -> Any:  # noqa: ARG001
    from phyai.triton.fp8_rows import quantize_rows

    return product(quantize_rows, fast=params.get("fast_accumulation", False))


def _check(params: Mapping[str, Any]) -> None:
    fast = params.get("fast_accumulation", False)
    if not isinstance(fast, bool):
        raise TypeError(f"fast_accumulation is {fast!r}; allowed: true, false")


def register(catalog: Catalog) -> None:
    """Adds the row ``triton.gemm.fp8_rows``."""
    catalog.register(
        Impl(
            kernel_id="triton.gemm.fp8_rows",
            op="gemm",
            when=all_of(
                eq("quant.format", "fp8_e4m3"),
                is_none("quant.layout"),
                NVIDIA,
                at_least("sm89"),
                lib("triton"),
                divisible("shape.K", 16),
                divisible("shape.N", 16),
                eq("quant.granularity", "per_channel"),
                eq("quant.fields.activation", "fp8_e4m3"),
                eq("quant.fields.input_granularity", "per_channel"),
                eq("quant.fields.input_scale", "dynamic"),
                one_of("dtype.input", "bf16"),
            ),
            prepare=_prepare,
            priority=Priority.OPTIMIZED,
            accepts=("fast_accumulation",),
            check_params=_check,
            metadata={"package": "triton", "takes_fp8_rows": True},
        )
    )
