"""Products with piper-kernels' weight formats: ConvRot INT8, NVFP4 and ConvRot NVFP4."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import divisible, eq, one_of, same
from phyai.dispatch.facts import Facts
from phyai.dispatch.opspec import Impl, Priority
from phyai.dispatch.predicate import Predicate, all_of
from phyai.kernels.fp8_rows import Int8Rows

_FORMAT, _LAYOUT = "quant.format", "quant.layout"
_BLOCK = 16

Gemm = Callable[[Any, Any, Tensor | None], Tensor]


def _prepare_int8(facts: Facts, params: Mapping[str, Any]) -> Gemm:  # noqa: ARG001
    from piper_kernels.linear.convrot import convrot_int8_linear
    from piper_kernels.linear.convrot.int8.rows import multiply_rows

    def run(layer: Any, x: Tensor | Int8Rows, bias: Tensor | None) -> Tensor:
        if isinstance(x, Int8Rows):
            return multiply_rows(x.codes, x.scales, layer.weight, bias, x.dtype)
        return convrot_int8_linear(x, layer.weight, bias)

    return run


def _prepare_nvfp4(facts: Facts, params: Mapping[str, Any]) -> Gemm:  # noqa: ARG001
    # Imported here: they bring torchao, which nothing else of the engine needs.
    from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

    from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
    from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

    quantizes = facts["quant.fields.activation"] == "nvfp4"
    group = facts["quant.fields.rotation_group"] if facts[_LAYOUT] == "convrot" else None

    def legs_of(layer: Any, dtype: torch.dtype) -> list[Tensor]:
        """Returns each leg as a weight tensor: legs have global scales of their own."""
        act = getattr(layer, "input_scale", None) if quantizes else None
        options: dict[str, Any] = {}
        if quantizes:
            options["act_quant_kwargs"] = QuantizeTensorToNVFP4Kwargs(
                use_dynamic_per_tensor_scale=act is None
            )
            options["act_per_tensor_scale"] = None if act is None else act.detach().view(())
        if group is not None:
            options["group_size"] = group
        make: Any = PiperNVFP4Tensor if group is None else ConvRotNVFP4Tensor
        widths = list(layer.logical_widths)
        parts = zip(
            layer.weight.detach().split(widths),
            layer.weight_scale.detach().split(widths),
            layer.weight_global_scale.detach(),
            strict=True,
        )
        return [
            make(codes, scale, _BLOCK, dtype, per_tensor_scale=level, **options)
            for codes, scale, level in parts
        ]

    def run(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        key = (x.dtype, layer.weight.data_ptr())
        known = layer.__dict__.get("_piper_legs")
        if known is None or known[0] != key:
            known = layer.__dict__["_piper_legs"] = (key, legs_of(layer, x.dtype))
        legs = known[1]
        biases = [None] * len(legs) if bias is None else bias.split(list(layer.logical_widths))
        outs = [functional.linear(x, leg, part) for leg, part in zip(legs, biases, strict=True)]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)

    return run


def _nvfp4(layout: str) -> Predicate:
    return all_of(
        eq(_FORMAT, "nvfp4"),
        eq(_LAYOUT, layout),
        eq("quant.block_k", _BLOCK),
        one_of("quant.fields.activation", "a16", "nvfp4"),
        one_of("device.vendor", "nvidia", "amd"),
        one_of("dtype.input", "bf16", "fp16", "fp32"),
        same("dtype.output", "dtype.input"),
        divisible("shape.K", _BLOCK),
    )


_ROWS: dict[str, tuple[Predicate, Any]] = {
    "convrot_int8": (all_of(eq(_FORMAT, "int8"), eq(_LAYOUT, "convrot")), _prepare_int8),
    "convrot_nvfp4": (_nvfp4("convrot"), _prepare_nvfp4),
    "nvfp4_linear": (_nvfp4("linear"), _prepare_nvfp4),
}


def register(catalog: Catalog) -> None:
    """Adds the ``piper.gemm.*`` rows."""
    for name, (when, prepare) in _ROWS.items():
        catalog.register(
            Impl(
                kernel_id=f"piper.gemm.{name}",
                op="gemm",
                when=when,
                prepare=prepare,
                priority=Priority.SPECIALIZED,
                metadata={"package": "piper-kernels", "takes_int8_rows": name == "convrot_int8"},
            )
        )
