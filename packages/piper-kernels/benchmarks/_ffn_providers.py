"""Who can run a feed-forward network: ours, bf16, and networks of the alternatives' linears."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from _ffn_models import FeedForwardCase, quantized
from _harness import device
from _linear_cases import LinearCase
from _linear_providers import PROVIDERS
from torch import Tensor, nn
from torch.nn import functional

from piper_kernels.fusions._ffn.chunks import int8_chunk_rows

GROUP = 256
# bf16 rounds after every linear; INT8 codes of rotated rows are 0.8 to 1 % off, twice in each. The
# result of a block contains its input, which is as large as what the block adds. Others do not
# rotate, or have numbers of 8 or 4 bits with few digits.
MINIMUM_SQNR = {"bf16": 44.0, "piper": 30.0, "piper block": 34.0, "4 bits": 8.0, "other": 14.0}
ALTERNATIVES = ("int_mm", "fp8_rowwise", "torchao_int8", "humming_int8", "humming_w4a16")
LABELS = {
    "bf16": "bf16 eager",
    "bf16_compiled": "bf16 compiled",
    "piper_int8": "ConvRot INT8 eager",
    "piper_int8_operator": "ConvRot INT8 fused operator",
    "piper_int8_compiled": "ConvRot INT8 compiled with the options",
    "piper_nvfp4_compiled": "NVFP4 W4A4 compiled with the options",
    "piper_convrot_nvfp4_compiled": "ConvRot NVFP4 W4A4 compiled with the options",
    **{name: PROVIDERS[name].label for name in ALTERNATIVES},
}
"""Providers by the name that ``--providers`` takes."""
_FORMATS = {"piper_nvfp4_compiled": "nvfp4", "piper_convrot_nvfp4_compiled": "convrot_nvfp4"}

Run = Callable[[Tensor], Tensor]


def minimum_sqnr(name: str, kind: str) -> float:
    """Return the decibels below which the result of a provider is wrong."""
    if "nvfp4" in name or "w4a16" in name:
        return MINIMUM_SQNR["4 bits"]
    family = name.partition("_")[0] if name.startswith(("bf16", "piper")) else "other"
    return MINIMUM_SQNR[f"{family} block" if (family, kind) == ("piper", "block") else family]


def compile_options(kind: str, weights: str = "convrot_int8") -> Any:
    """Return the Inductor options of a network: FFN fusion and shared preparations."""
    name = f"{weights}_{'gelu' if kind == 'gelu' else 'swiglu'}_ffn"
    module = importlib.import_module(f"piper_kernels.fusions.{name}")
    return getattr(module, f"{name}_compile_options")()


def fused_operator(case: FeedForwardCase, model: nn.Module) -> Run:
    """Return the fused operator with the weights of a feed-forward network."""
    compile_options(case.kind)  # imports what registers the operator
    parts = ("up", "down") if case.kind == "gelu" else ("gate", "value", "down")
    weights: list[Any] = []
    for part in parts:
        linear: Any = getattr(model, part)
        weight = linear.weight
        weights += [weight.qdata, weight.scale, linear.bias, weight.group_size]
    operator = getattr(torch.ops.piper_kernels, f"convrot_int8_{case.kind}_ffn")
    rows = int8_chunk_rows(len(parts) - 1, case.width, case.inner, case.width, 2)
    return lambda x: operator(x, *weights, rows)


def compiled(model: nn.Module, options: Any = None) -> Run:
    """Return a network compiled as one graph."""
    run: Any = torch.compile(model, fullgraph=True, options=options)
    return run


def _gated(gate: Tensor, value: Tensor) -> Tensor:
    return functional.silu(gate) * value


def _gelu(hidden: Tensor) -> Tensor:
    return functional.gelu(hidden, approximate="tanh")


def _linear_case(linear: Any, rows: int) -> LinearCase:
    outputs, features = linear.weight.shape
    return LinearCase(rows, outputs, features, bias=linear.bias is not None, group=GROUP)


def refusal(name: str, case: FeedForwardCase, model: nn.Module) -> str:
    """Return why a provider cannot run a network, ``""`` when it can."""
    if name not in ALTERNATIVES:
        return ""
    for linear in _linears(model).values():
        reason = PROVIDERS[name].refusal(_linear_case(linear, case.rows), device())
        if reason:
            return reason
    return ""


def _linears(model: nn.Module) -> dict[str, Any]:
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}


def composed(name: str, case: FeedForwardCase, model: nn.Module) -> Run:
    """Return a network of a provider's linears, its activation compiled."""
    parts = {
        key: PROVIDERS[name]
        .build(_linear_case(part, case.rows), part.weight.detach(), part.bias)
        .linear
        for key, part in _linears(model).items()
    }
    activate: Any = _gelu if case.kind == "gelu" else _gated
    if device().type == "cuda":
        activate = torch.compile(activate, dynamic=True)

    def run(x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        sources = ("up",) if case.kind == "gelu" else ("gate", "value")
        hidden = activate(*(parts[key](rows) for key in sources))
        return parts["down"](hidden).view(x.shape)

    return run


def runners(case: FeedForwardCase, model: nn.Module) -> dict[str, Callable[[], Run]]:
    """Return what builds the function of each provider that runs such a network."""

    @cache
    def packed(weights: str = "convrot_int8") -> nn.Module:
        return quantized(model, GROUP, weights)

    found: dict[str, Callable[[], Run]] = {
        "bf16": lambda: model,
        "bf16_compiled": lambda: compiled(model),
        "piper_int8": packed,
        "piper_int8_operator": lambda: fused_operator(case, packed()),
        "piper_int8_compiled": lambda: compiled(packed(), compile_options(case.kind)),
    }
    if case.kind == "block":
        del found["piper_int8_operator"]
        return found
    for name, weights in _FORMATS.items():
        found[name] = lambda weights=weights: compiled(
            packed(weights), compile_options(case.kind, weights)
        )
    for name in ALTERNATIVES:
        found[name] = lambda name=name: composed(name, case, model)
    return found


def stored_bytes(name: str, model: nn.Module) -> int:
    """Return the bytes of the weights of a provider's network, and of its biases."""
    if name not in ALTERNATIVES:
        weights = _FORMATS.get(name, "convrot_int8")
        return weight_bytes(quantized(model, GROUP, weights) if "piper" in name else model)
    total = 0
    for parameter in model.parameters():
        bits = PROVIDERS[name].weight_bits if parameter.ndim == 2 else 16
        total += int(parameter.numel() * bits / 8)
    return total


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of the parameters of a network, of packed ones those of their storage."""
    total = 0
    for parameter in model.parameters():
        weight: Any = parameter
        names = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else ()
        parts = [getattr(weight, name) for name in names] or [weight]
        total += sum(part.numel() * part.element_size() for part in parts)
    return total
