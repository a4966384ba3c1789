"""Who can multiply: ours and the alternatives, behind one interface.

A provider says why it cannot take part in a case, and builds an operator from a dense weight.
Alternatives that PyTorch would run as several kernels are compiled, as their users would do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import _humming
import torch
from _linear_cases import LinearCase
from torch import Tensor
from torch.nn import functional

from piper_kernels._input_activations import apply_activation
from piper_kernels.linear.convrot import convrot_int8_linear
from piper_kernels.linear.convrot.int8 import reference as int8_reference
from piper_kernels.linear.nvfp4 import reference as nvfp4_reference
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

E4M3_MAX = 448.0
_int_mm_operator: Callable[..., Tensor] = torch.ops.aten._int_mm.default
_scaled_mm: Callable[..., Tensor] = torch.ops.aten._scaled_mm.default


@dataclass(frozen=True)
class Operator:
    """A linear with one weight.

    Attributes:
        linear: The whole operation on a bf16 input.
        prepare: What happens to the input before the product, or ``None``.
        multiply: The product of a prepared input, or ``None``.
        reference: The maths of the format in plain PyTorch, or ``None``.
    """

    linear: Callable[[Tensor], Tensor]
    prepare: Callable[[Tensor], Any] | None = None
    multiply: Callable[[Any], Tensor] | None = None
    reference: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Provider:
    """A way to compute linears.

    Attributes:
        label: Name in tables.
        weight_bits: Stored bits of a weight element.
        minimum_sqnr: dB below which a result is wrong, with the inputs of the benchmark.
        refusal: Returns why a case cannot be run on a device, ``""`` when it can.
        build: Returns the operator of a weight ``[N, K]`` and a bias.
    """

    label: str
    weight_bits: float
    minimum_sqnr: float
    refusal: Callable[[LinearCase, torch.device], str]
    build: Callable[[LinearCase, Tensor, Tensor | None], Operator]


def _any_case(_case: LinearCase, _device: torch.device) -> str:
    return ""


def _compiled(function: Callable[..., Any], example: Tensor) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True) if example.is_cuda else function


def _activate(x: Tensor, activation: str | None) -> Tensor:
    return apply_activation(x, activation).to(x.dtype)


def _bf16(case: LinearCase, weight: Tensor, bias: Tensor | None) -> Operator:
    if case.activation is None:
        return Operator(lambda x: functional.linear(x, weight, bias))
    activate = _compiled(_activate, weight)
    return Operator(
        lambda x: functional.linear(activate(x, case.activation), weight, bias),
        lambda x: activate(x, case.activation),
        lambda prepared: functional.linear(prepared, weight, bias),
    )


def _piper_int8(case: LinearCase, weight: Tensor, bias: Tensor | None) -> Operator:
    quantized = ConvRotInt8Tensor.from_hp(weight, group_size=case.group)
    storage, ops = (quantized.qdata, quantized.scale), torch.ops.piper_kernels
    kind = case.activation
    return Operator(
        lambda x: convrot_int8_linear(x, quantized, bias, activation_fn=kind),
        lambda x: ops.convrot_int8_prepare_input(x, case.group, kind),
        lambda prepared: ops.convrot_int8_linear_prepared(*prepared, *storage, bias, weight.dtype),
        lambda x: int8_reference.linear(x, *storage, case.group, bias, activation_fn=kind),
    )


def _quantize_int8(x: Tensor, activation: str | None) -> tuple[Tensor, Tensor]:
    values = apply_activation(x, activation)
    scale = values.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / 127
    return (values / scale).round().clamp(-128, 127).to(torch.int8), scale


def _scale(total: Tensor, scale: Tensor, columns: Tensor, bias: Tensor | None) -> Tensor:
    output = total.float() * scale * columns
    return (output if bias is None else output + bias).to(torch.bfloat16)


def _int_mm(case: LinearCase, weight: Tensor, bias: Tensor | None) -> Operator:
    codes, rows = _quantize_int8(weight, None)
    columns, right = rows.t(), codes.t()
    quantize, finish = _compiled(_quantize_int8, weight), _compiled(_scale, weight)

    def linear(x: Tensor) -> Tensor:
        left, scale = quantize(x, case.activation)
        return finish(_int_mm_operator(left, right), scale, columns, bias)

    return Operator(
        linear,
        lambda x: quantize(x, case.activation),
        lambda prepared: _int_mm_operator(prepared[0], right),
    )


def _int_mm_refusal(case: LinearCase, device: torch.device) -> str:
    if device.type == "cuda" and case.m <= 16:
        return "torch._int_mm takes more than 16 rows"
    return ""


def _quantize_fp8(x: Tensor, activation: str | None) -> tuple[Tensor, Tensor]:
    values = apply_activation(x, activation)
    scale = values.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / E4M3_MAX
    return (values / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def _fp8(case: LinearCase, weight: Tensor, bias: Tensor | None) -> Operator:
    codes, rows = _quantize_fp8(weight, None)
    right, columns = codes.t(), rows.t()
    quantize = _compiled(_quantize_fp8, weight)

    def multiply(prepared: tuple[Tensor, Tensor]) -> Tensor:
        left, scale = prepared
        return _scaled_mm(
            left, right, scale, columns, bias, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return Operator(
        lambda x: multiply(quantize(x, case.activation)),
        lambda x: quantize(x, case.activation),
        multiply,
    )


def _fp8_refusal(_case: LinearCase, device: torch.device) -> str:
    if device.type != "cuda":
        return "row-wise torch._scaled_mm needs a GPU"
    capability = torch.cuda.get_device_capability(device)
    return "" if capability >= (8, 9) else f"FP8 products need sm_89, this is {capability}"


def _torchao_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, bias)


_torchao_compiled = torch.compile(_torchao_linear, dynamic=False)


def _torchao(_case: LinearCase, weight: Tensor, bias: Tensor | None) -> Operator:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    layer = torch.nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize_(layer, Int8DynamicActivationInt8WeightConfig())
    quantized = layer.weight
    run = _torchao_compiled if weight.is_cuda else _torchao_linear
    return Operator(lambda x: run(x, quantized, bias))


def _torchao_refusal(case: LinearCase, _device: torch.device) -> str:
    return "torchao's linear has no input activation" if case.activation else ""


def nvfp4_options(*, quantized_input: bool) -> dict[str, Any]:
    """Return the options of an NVFP4 weight with two scale levels, swizzled as kernels read them.

    Args:
        quantized_input: Whether linears quantize their input, with a dynamic second level.
    """
    options: dict[str, Any] = {"compute_per_tensor_scale": True, "is_swizzled_scales": True}
    if quantized_input:
        from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

        options["act_quant_kwargs"] = QuantizeTensorToNVFP4Kwargs(
            block_size=16,
            is_swizzled_scales=True,
            use_triton_kernel=False,
            use_dynamic_per_tensor_scale=True,
        )
    return options


def _nvfp4_refusal(case: LinearCase, _device: torch.device) -> str:
    return "not measured with an input activation" if case.activation else ""


def _nvfp4(rotated: bool, quantized_input: bool) -> Callable[..., Operator]:
    def build(case: LinearCase, weight: Tensor, bias: Tensor | None) -> Operator:
        options = nvfp4_options(quantized_input=quantized_input)
        if rotated:
            quantized: PiperNVFP4Tensor = ConvRotNVFP4Tensor.from_hp(
                weight, group_size=case.group, **options
            )
        else:
            quantized = PiperNVFP4Tensor.from_hp(weight, **options)

        def linear(x: Tensor) -> Tensor:
            return functional.linear(x, quantized, bias)

        def exact_weight(x: Tensor) -> Tensor:
            dense = quantized.dequantize(torch.float32)
            return functional.linear(x.float(), dense, None if bias is None else bias.float())

        group = case.group if rotated else 0
        storage = (quantized.qdata, quantized.scale)
        level = quantized.per_tensor_scale
        level = None if level is None else level.view(())
        if not quantized_input:
            return Operator(linear, reference=exact_weight)
        ops = torch.ops.piper_kernels

        def prepare(x: Tensor) -> Any:
            if rotated:
                return ops.convrot_nvfp4_prepare_input(x, None, True, group)
            return ops.nvfp4_prepare_input(x, None, True)

        return Operator(
            linear,
            prepare,
            lambda prepared: ops.nvfp4_linear_prepared(
                *prepared, *storage, level, bias, weight.dtype
            ),
            lambda x: nvfp4_reference.linear(
                x, *storage, level, None, bias, True, group_size=group
            ),
        )

    return build


def _humming_provider(kind: str) -> Callable[..., Operator]:
    def build(_case: LinearCase, weight: Tensor, bias: Tensor | None) -> Operator:
        return Operator(_humming.build(kind, weight, bias))

    return build


PROVIDERS = {
    "piper_int8": Provider("ConvRot INT8", 8, 24, _any_case, _piper_int8),
    "piper_nvfp4": Provider("NVFP4 weights", 4.5, 14, _nvfp4_refusal, _nvfp4(False, False)),
    "piper_convrot_nvfp4": Provider(
        "ConvRot NVFP4 weights", 4.5, 14, _nvfp4_refusal, _nvfp4(True, False)
    ),
    "piper_nvfp4_w4a4": Provider("NVFP4 W4A4", 4.5, 10, _nvfp4_refusal, _nvfp4(False, True)),
    "piper_convrot_nvfp4_w4a4": Provider(
        "ConvRot NVFP4 W4A4", 4.5, 10, _nvfp4_refusal, _nvfp4(True, True)
    ),
    "bf16": Provider("bf16 F.linear", 16, 50, _any_case, _bf16),
    "int_mm": Provider("torch._int_mm composition", 8, 14, _int_mm_refusal, _int_mm),
    "fp8_rowwise": Provider("FP8 row-wise _scaled_mm", 8, 20, _fp8_refusal, _fp8),
    "torchao_int8": Provider("torchao INT8 dynamic", 8, 14, _torchao_refusal, _torchao),
    "humming_int8": Provider(
        "Humming W8A8 INT8", 8, 14, _humming.refusal, _humming_provider("int8")
    ),
    "humming_w4a16": Provider("Humming W4A16", 4, 12, _humming.refusal, _humming_provider("w4a16")),
    "humming_nvfp4": Provider(
        "Humming NVFP4 weights", 4.5, 12, _humming.refusal, _humming_provider("nvfp4")
    ),
}
"""Providers by the name that ``--providers`` takes."""
