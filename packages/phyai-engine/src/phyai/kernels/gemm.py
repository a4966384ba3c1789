"""Matrix products with weights of any format: ``(layer, x, bias)`` to ``x Wᵀ + bias``."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import (
    at_least,
    compare,
    divisible,
    eq,
    family_in,
    is_none,
    lib,
    one_of,
    same,
)
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.dispatch.predicate import Predicate, all_of, any_of
from phyai.kernels import gemm_flashinfer, gemm_fp8, gemm_humming, gemm_piper
from phyai.kernels.bench_gemm import gemm_inputs
from phyai.kernels.conditions import NVIDIA, returns

_FORMAT, _LAYOUT = "quant.format", "quant.layout"
_FP8 = all_of(eq(_FORMAT, "fp8_e4m3"), is_none(_LAYOUT))
_CONVROT = all_of(eq(_FORMAT, "int8"), eq(_LAYOUT, "convrot"))


def _nvfp4(layout: str) -> Predicate:
    return all_of(eq(_FORMAT, "nvfp4"), eq(_LAYOUT, layout), eq("quant.block_k", 16))


_DEQUANTIZED: dict[str, Predicate] = {
    "fp8_block": all_of(_FP8, eq("quant.granularity", "block"), NVIDIA, at_least("sm89")),
    "fp8_dequant": all_of(one_of(_FORMAT, "fp8_e4m3", "fp8_e5m2"), is_none(_LAYOUT)),
    "int8_rows": all_of(eq(_FORMAT, "int8"), is_none(_LAYOUT)),
    "int_packed": all_of(one_of(_FORMAT, "int4", "int8"), eq(_LAYOUT, "packed")),
    "nvfp4_linear": _nvfp4("linear"),
    "nvfp4_128x4": _nvfp4("128x4"),
    "mxfp4_linear": all_of(eq(_FORMAT, "mxfp4"), eq(_LAYOUT, "linear"), eq("quant.block_k", 32)),
    "convrot_int8": _CONVROT,
    "convrot_nvfp4": _nvfp4("convrot"),
    "humming_raw": eq(_LAYOUT, "humming_raw"),
}
"""Reference rows ``torch.gemm.<name>``: one for every layout that weight formats have."""


def _dense(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, layer.weight, bias)


def _dequantized(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies in fp32 by the weight read back.

    Where the layer's format quantizes the input, it is quantized and read back first.
    """
    spec = layer.spec
    weight = spec.dequantize_weight(layer)
    if x.numel() == 0:
        return x.new_zeros((*x.shape[:-1], weight.shape[0]))
    quantizes = getattr(spec, "needs_act_quant", False)
    values = spec.fake_quantize_activation(x, layer) if quantizes else x.float()
    wide_bias = None if bias is None else bias.float()
    return functional.linear(values, weight, wide_bias).to(x.dtype)


def _fp8_scaled_mm(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Quantizes the input as the layer's format says and multiplies in FP8 by row scales."""
    rows, features = layer.weight.shape[0], x.shape[-1]
    if x.numel() == 0:
        return x.new_zeros((*x.shape[:-1], rows))
    view = layer.spec.quantize_activation(x.reshape(-1, features), layer)
    out = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        view.x,
        layer.weight.t(),
        scale_a=view.x_scale.reshape(-1, 1).expand(view.x.shape[0], 1).contiguous(),
        scale_b=layer.weight_scale.reshape(1, -1).expand(1, rows).contiguous(),
        out_dtype=torch.bfloat16,
    )
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], rows).to(x.dtype)


def _small(facts: Any, params: Any) -> Any:  # noqa: ARG001
    from phyai.triton.small_gemm import small_gemm

    return lambda layer, x, bias: small_gemm(x, layer.weight, bias)


def _split(facts: Any, params: Any) -> Any:  # noqa: ARG001
    from phyai.triton.split_gemm import split_gemm

    return lambda layer, x, bias: split_gemm(x, layer.weight, bias)


def _hopper(facts: Any, params: Any) -> Any:  # noqa: ARG001
    # Fails where Triton has no Gluon, and so leaves the choice to the next row.
    from phyai.triton.hopper_gemm import hopper_gemm

    return lambda layer, x, bias: hopper_gemm(x, layer.weight, bias)


def _row(
    kernel_id: str, when: Predicate, prepare: Any, priority: int, *, reference: bool = False
) -> Impl:
    return Impl(
        kernel_id=kernel_id,
        op="gemm",
        when=when,
        prepare=prepare,
        priority=priority,
        reference=reference,
    )


def _fp8_row(granularity: str) -> Impl:
    when = all_of(
        _FP8,
        NVIDIA,
        at_least("sm89"),
        divisible("shape.K", 16),
        divisible("shape.N", 16),
        eq("quant.granularity", granularity),
        eq("quant.fields.activation", "fp8_e4m3"),
        one_of("quant.fields.input_granularity", "per_tensor", "per_channel"),
        eq("dtype.input", "bf16"),
    )
    return _row(f"torch.gemm.fp8_{granularity}", when, returns(_fp8_scaled_mm), Priority.GENERAL)


def _triton_rows(dense: Predicate) -> tuple[Impl, ...]:
    """Returns the rows of dense weights that are kernels of this package."""
    return (
        _row(
            "triton.gemm.small_fp32",
            all_of(
                dense,
                NVIDIA,
                lib("triton"),
                eq("dtype.input", "fp32"),
                eq("dtype.weight", "fp32"),
                compare("shape.M", "<=", 256),
                any_of(compare("shape.N", "<=", 64), compare("shape.K", "<=", 64)),
                compare("shape.K", "<=", 4096),
            ),
            _small,
            Priority.OPTIMIZED,
        ),
        _row(
            "triton.gemm.split_fp32",
            all_of(
                dense,
                NVIDIA,
                at_least("sm80"),
                lib("triton"),
                eq("dtype.input", "fp32"),
                eq("dtype.weight", "fp32"),
                compare("shape.M", ">=", 256),
                divisible("shape.K", 4),
            ),
            _split,
            # Not bit for bit what cuBLAS sums: a policy prefers it.
            Priority.REFERENCE,
        ),
        _row(
            "triton.gemm.hopper",
            all_of(
                eq(_FORMAT, "bf16"),
                NVIDIA,
                family_in("sm9"),
                lib("triton"),
                eq("dtype.input", "bf16"),
                eq("dtype.weight", "bf16"),
                same("dtype.output", "dtype.input"),
                compare("shape.M", ">=", 256),
                divisible("shape.N", 16),
                divisible("shape.K", 8),
            ),
            _hopper,
            # Behind cuBLAS, whose row has the same priority and an earlier id: a policy prefers it.
            Priority.REFERENCE,
        ),
    )


def populate(catalog: Catalog) -> None:
    """Declares ``gemm`` and its rows."""
    catalog.register_op(
        OpSpec(
            name="gemm",
            dims=("M", "N", "K"),
            dtypes=("input", "output"),
            optional_dtypes=("weight",),
            signature="(layer, x, bias) -> Tensor",
            bench_args=gemm_inputs,
            doc="x [..., K] times layer.weight [N, K] transposed, plus bias [N] or None.",
        )
    )
    dequantized = returns(_dequantized)
    lowest = Priority.REFERENCE
    dense = one_of(_FORMAT, "bf16", "fp16")
    rows = (
        _row("torch.gemm.bf16", dense, returns(_dense), lowest, reference=True),
        *_triton_rows(dense),
        _fp8_row("per_tensor"),
        _fp8_row("per_channel"),
        *(
            _row(f"torch.gemm.{name}", when, dequantized, lowest, reference=True)
            for name, when in _DEQUANTIZED.items()
        ),
    )
    for row in rows:
        catalog.register(row)
    gemm_fp8.register(catalog)
    gemm_flashinfer.register(catalog)
    gemm_humming.register(catalog)
    gemm_piper.register(catalog)
