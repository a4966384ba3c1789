"""Matrix products with weights of any format: ``(layer, x, bias)`` to ``x Wᵀ + bias``."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import at_least, divisible, eq, is_none, one_of
from phyai.dispatch.facts import Facts
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.dispatch.predicate import Predicate, all_of
from phyai.kernels import gemm_flashinfer, gemm_humming
from phyai.kernels.bench import random_tensor
from phyai.kernels.conditions import NVIDIA, returns

_FP8 = all_of(eq("quant.format", "fp8_e4m3"), is_none("quant.layout"))
_CONVROT = all_of(eq("quant.format", "int8"), eq("quant.layout", "convrot"))
_NVFP4_LINEAR = all_of(
    eq("quant.format", "nvfp4"), eq("quant.layout", "linear"), eq("quant.block_k", 16)
)


def _dense(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, layer.weight, bias)


def _dequantized(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies by the weight read back in fp32; the input is not quantized."""
    weight = layer.spec.dequantize_weight(layer)
    wide_bias = None if bias is None else bias.float()
    return functional.linear(x.float(), weight, wide_bias).to(x.dtype)


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


def _prepare_convrot(facts: Facts, params: Any) -> Any:  # noqa: ARG001
    from piper_kernels.linear.convrot import convrot_int8_linear

    def run(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return convrot_int8_linear(x, layer.weight, bias)

    return run


def _bench_args(facts: Facts, device: Any) -> tuple[Any, ...]:
    if facts["quant.format"] not in {"bf16", "fp16"}:
        raise NotImplementedError(f"no benchmark weights of format {facts['quant.format']!r}")
    m, n, k = (facts[f"shape.{name}"] for name in "MNK")
    weight = facts.get("dtype.weight")
    stored = weight if isinstance(weight, str) else facts["dtype.input"]
    layer = SimpleNamespace(weight=random_tensor((n, k), stored, device))
    return layer, random_tensor((m, k), facts["dtype.input"], device), None


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


def populate(catalog: Catalog) -> None:
    """Declares ``gemm`` and its rows."""
    catalog.register_op(
        OpSpec(
            name="gemm",
            dims=("M", "N", "K"),
            dtypes=("input", "output"),
            optional_dtypes=("weight",),
            signature="(layer, x, bias) -> Tensor",
            bench_args=_bench_args,
            doc="x [..., K] times layer.weight [N, K] transposed, plus bias [N] or None.",
        )
    )
    block = all_of(_FP8, eq("quant.granularity", "block"), NVIDIA, at_least("sm89"))
    dequantized = returns(_dequantized)
    lowest = Priority.REFERENCE
    rows = (
        _row(
            "torch.gemm.bf16",
            one_of("quant.format", "bf16", "fp16"),
            returns(_dense),
            lowest,
            reference=True,
        ),
        _fp8_row("per_tensor"),
        _fp8_row("per_channel"),
        _row("torch.gemm.fp8_block", block, dequantized, lowest, reference=True),
        _row("torch.gemm.fp8_dequant", _FP8, dequantized, lowest, reference=True),
        _row("torch.gemm.nvfp4_linear", _NVFP4_LINEAR, dequantized, lowest, reference=True),
        _row("piper.gemm.convrot_int8", _CONVROT, _prepare_convrot, Priority.SPECIALIZED),
        _row("torch.gemm.convrot_int8", _CONVROT, dequantized, lowest, reference=True),
    )
    for row in rows:
        catalog.register(row)
    gemm_flashinfer.register(catalog)
    gemm_humming.register(catalog)
