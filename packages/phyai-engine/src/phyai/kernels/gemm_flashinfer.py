"""FlashInfer's matrix products: dense bf16, FP8 with block scales, NVFP4."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import at_least, divisible, eq, is_none, lib, one_of
from phyai.dispatch.facts import Facts
from phyai.dispatch.opspec import Impl, Priority
from phyai.dispatch.predicate import all_of
from phyai.kernels.conditions import FLASHINFER

_FP8_MAX = 448.0
_FP4_MAX = 6.0
_SCALE_FLOOR = 1e-12

Gemm = Callable[[Any, Tensor, Tensor | None], Tensor]


def _flat(kernel: Callable[[Any, Tensor], Tensor]) -> Gemm:
    """Wraps a product of 2-D rows: flattens, restores leading dims, adds the bias."""

    def run(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        n = layer.weight.shape[0]
        out = kernel(layer, rows.contiguous()) if rows.shape[0] else x.new_zeros((0, n))
        if bias is not None:
            out = out + bias
        return out.view(*x.shape[:-1], out.shape[-1])

    return run


def _prepare_bf16(facts: Facts, params: Mapping[str, Any]) -> Gemm:  # noqa: ARG001
    from flashinfer import mm_bf16

    def product(layer: Any, rows: Tensor) -> Tensor:
        return mm_bf16(rows, layer.weight.t())

    return _flat(product)


def _quantize_blocks(rows: Tensor, block_k: int) -> tuple[Tensor, Tensor]:
    """Returns e4m3 codes [M, K] and fp32 scales [M, K / block_k], one per token and K block."""
    blocks = rows.float().view(rows.shape[0], -1, block_k)
    scale = (blocks.abs().amax(-1) / _FP8_MAX).clamp_min(_SCALE_FLOOR)
    codes = (blocks / scale.unsqueeze(-1)).clamp(-_FP8_MAX, _FP8_MAX)
    return codes.to(torch.float8_e4m3fn).view(rows.shape), scale


def _prepare_fp8_block(facts: Facts, params: Mapping[str, Any]) -> Gemm:  # noqa: ARG001
    from flashinfer.gemm import gemm_fp8_nt_groupwise

    def product(layer: Any, rows: Tensor) -> Tensor:
        block_n, block_k = layer.spec.physical_signature.block_shape
        codes, scale = _quantize_blocks(rows, block_k)
        return gemm_fp8_nt_groupwise(
            codes,
            layer.weight,
            scale,
            layer.weight_scale,
            scale_major_mode="K",
            scale_granularity_mnk=(1, block_n, block_k),
            out_dtype=rows.dtype,
        )

    return _flat(product)


def _leg_ratios(layer: Any, largest: Tensor) -> Tensor:
    """Returns each row's global scale over the largest, [N], without reading any value."""
    ratios = layer.weight_global_scale / largest
    parts = zip(ratios, layer.logical_widths, strict=True)
    return torch.cat([ratio.expand(width) for ratio, width in parts])


def _prepare_nvfp4(facts: Facts, params: Mapping[str, Any]) -> Gemm:  # noqa: ARG001
    from flashinfer.gemm import mm_fp4
    from flashinfer.quantization.fp4_quantization import nvfp4_quantize
    from flashinfer.tllm_enums import SfLayout

    def product(layer: Any, rows: Tensor) -> Tensor:
        level = getattr(layer, "input_scale", None)
        if level is None:
            level = rows.abs().amax().float() / (_FP8_MAX * _FP4_MAX)
        level = level.reshape(1).clamp_min(_SCALE_FLOOR)
        layout = SfLayout.layout_128x4
        codes, scale = nvfp4_quantize(rows, 1.0 / level, sfLayout=layout)[:2]
        largest = layer.weight_global_scale.amax()
        out = mm_fp4(
            codes,
            layer.weight.t(),
            scale,
            layer.weight_scale.t(),
            alpha=largest * level,
            out_dtype=rows.dtype,
        )
        if len(layer.logical_widths) == 1:
            return out
        return (out * _leg_ratios(layer, largest)).to(rows.dtype)

    return _flat(product)


def register(catalog: Catalog) -> None:
    """Adds the ``flashinfer.gemm.*`` rows."""
    rows = (
        (
            "bf16",
            Priority.OPTIMIZED + 2,
            _prepare_bf16,
            (
                eq("quant.format", "bf16"),
                at_least("sm80"),
                eq("dtype.input", "bf16"),
                one_of("dtype.weight", None, "bf16"),
                lib("cudnn"),
            ),
        ),
        (
            "fp8_block",
            Priority.SPECIALIZED,
            _prepare_fp8_block,
            (
                eq("quant.format", "fp8_e4m3"),
                is_none("quant.layout"),
                eq("quant.granularity", "block"),
                at_least("sm100"),
                eq("quant.block_k", 128),
                divisible("shape.K", 128),
                eq("quant.fields.activation", "fp8_e4m3"),
                eq("quant.fields.input_granularity", "block"),
                eq("quant.fields.input_scale", "dynamic"),
            ),
        ),
        (
            "nvfp4_128x4",
            Priority.SPECIALIZED,
            _prepare_nvfp4,
            (
                eq("quant.format", "nvfp4"),
                eq("quant.layout", "128x4"),
                eq("quant.block_k", 16),
                at_least("sm100"),
                divisible("shape.K", 16),
                eq("quant.fields.activation", "nvfp4"),
            ),
        ),
    )
    for name, priority, prepare, conditions in rows:
        catalog.register(
            Impl(
                kernel_id=f"flashinfer.gemm.{name}",
                op="gemm",
                when=all_of(FLASHINFER, *conditions),
                prepare=prepare,
                priority=priority,
                metadata={"package": "flashinfer-python"},
            )
        )
