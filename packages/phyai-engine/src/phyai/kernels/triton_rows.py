"""The rows of the engine's own Triton kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import compare, eq, is_set, lib, one_of, same
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.opspec import Impl, ParamContract, Priority
from phyai.dispatch.predicate import Predicate, all_of

_FLOATS = ("bf16", "fp16", "fp32")
_LONGEST_ROW = 16384
_TRITON = all_of(one_of("device.vendor", "nvidia", "amd"), lib("triton"))
_INPUT = all_of(_TRITON, one_of("dtype.input", *_FLOATS))
_ROWS = all_of(_INPUT, compare("shape.hidden", "<=", _LONGEST_ROW))
_VARIANT = one_of("attrs.variant", "rms", "gemma", kind=FactKind.STR)

Prepare = Callable[[Facts, Any], Callable[..., Any]]


def _is_gemma(facts: Facts) -> bool:
    return facts["attrs.variant"] == "gemma"


def _rmsnorm(facts: Facts, params: Any) -> Callable[..., Any]:  # noqa: ARG001
    from phyai.triton.norms import rmsnorm

    gemma = _is_gemma(facts)
    return lambda x, weight, eps: rmsnorm(x, weight, eps, gemma=gemma)


def _rmsnorm_add(facts: Facts, params: Any) -> Callable[..., Any]:  # noqa: ARG001
    from phyai.triton.norms import rmsnorm_add

    gemma = _is_gemma(facts)
    return lambda x, residual, weight, eps: rmsnorm_add(x, residual, weight, eps, gemma=gemma)


def _layernorm_add(facts: Facts, params: Any) -> Callable[..., Any]:  # noqa: ARG001
    from phyai.triton.norms import layernorm_add

    return layernorm_add


def _layernorm(facts: Facts, params: Any) -> Callable[..., Any]:  # noqa: ARG001
    from phyai.triton.norms import layernorm

    return layernorm


def _rmsnorm_silu_mul(facts: Facts, params: Any) -> Callable[..., Any]:  # noqa: ARG001
    from phyai.triton.norms import rmsnorm_silu_mul

    return rmsnorm_silu_mul


def _channel_l2_norm(facts: Facts, params: Any) -> Callable[..., Any]:  # noqa: ARG001
    from phyai.triton.norms import channel_l2_norm

    def run(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        channel_first: bool,  # noqa: ARG001  # the condition asks for it
        compute_dtype: torch.dtype,  # noqa: ARG001
    ) -> Tensor:
        return channel_l2_norm(x, weight, bias, eps)

    return run


def _adarmsnorm(facts: Facts, params: Any) -> Callable[..., Any]:  # noqa: ARG001
    from phyai.triton.adaptive import adarmsnorm

    return adarmsnorm


def _adarmsnorm_add(facts: Facts, params: Any) -> Callable[..., Any]:  # noqa: ARG001
    from phyai.triton.adaptive import adarmsnorm_add

    return adarmsnorm_add


def _modulate(facts: Facts, params: Any) -> Callable[..., Any]:  # noqa: ARG001
    from phyai.triton.adaptive import modulate

    return modulate


def _activation(facts: Facts, params: Any) -> Callable[..., Any]:  # noqa: ARG001
    from phyai.triton.activation import activation

    kind, gated = facts["attrs.activation"], facts["attrs.gated"]
    return lambda x: activation(x, kind, gated=gated)


def _embedding(facts: Facts, params: Any) -> Callable[..., Any]:  # noqa: ARG001
    from phyai.triton.embedding import embedding

    return embedding


def _rope(facts: Facts, params: Any) -> Callable[..., Any]:  # noqa: ARG001
    from phyai.triton.rope import rope

    interleaved = facts["attrs.interleave"]
    return lambda positions, q, k, cache: rope(positions, q, k, cache, interleaved=interleaved)


def _causal_conv(facts: Facts, params: Any) -> Callable[..., Any]:  # noqa: ARG001
    from phyai.triton.causal_conv import causal_conv

    silu = facts["attrs.activation"] == "silu"

    def run(x: Tensor, weight: Tensor, split_sizes: list[int]) -> tuple[Tensor, ...]:
        return causal_conv(x, weight, silu=silu).split(split_sizes, dim=-1)

    return run


_CHANNELS = all_of(
    _INPUT,
    eq("attrs.fused_compatible", True, FactKind.BOOL),
    eq("attrs.channel_first", True, FactKind.BOOL),
    compare("shape.channels", "<=", 4096),
)
_CONV = all_of(
    _INPUT,
    compare("shape.kernel", ">=", 1),
    compare("shape.kernel", "<=", 8),
    one_of("attrs.activation", "none", "silu", kind=FactKind.STR),
)
_ACTIVATION = all_of(
    _INPUT, one_of("attrs.activation", "gelu", "gelu_tanh", "silu", "relu2", kind=FactKind.STR)
)
_SAME_DTYPE = all_of(same("dtype.shift", "dtype.input"), same("dtype.scale", "dtype.input"))

_TABLE: tuple[tuple[str, Predicate, Prepare, tuple[str, ...]], ...] = (
    ("rmsnorm", all_of(_ROWS, _VARIANT), _rmsnorm, ("weight",)),
    (
        "rmsnorm_add",
        all_of(_ROWS, one_of("dtype.residual", *_FLOATS), _VARIANT),
        _rmsnorm_add,
        ("weight",),
    ),
    ("layernorm", _ROWS, _layernorm, ("weight", "bias")),
    ("layernorm_add", _ROWS, _layernorm_add, ("weight", "bias")),
    ("rmsnorm_silu_mul", _ROWS, _rmsnorm_silu_mul, ("weight",)),
    ("channel_l2_norm", _CHANNELS, _channel_l2_norm, ("weight", "bias")),
    ("adarmsnorm", _ROWS, _adarmsnorm, ()),
    ("adarmsnorm_add", _ROWS, _adarmsnorm_add, ()),
    ("modulate", all_of(_ROWS, _SAME_DTYPE), _modulate, ()),
    ("activation", _ACTIVATION, _activation, ()),
    ("embedding", all_of(_TRITON, one_of("dtype.weight", *_FLOATS)), _embedding, ()),
    ("rope", all_of(_INPUT, is_set("attrs.rope_type")), _rope, ()),
    ("causal_conv", _CONV, _causal_conv, ()),
)


def populate(catalog: Catalog) -> None:
    """Declares one row for each operation that has a Triton kernel here."""
    for op, when, prepare, params in _TABLE:
        catalog.register(
            Impl(
                kernel_id=f"triton.{op}",
                op=op,
                when=when,
                prepare=prepare,
                # FlashInfer's row adds in a launch of its own.
                priority=Priority.OPTIMIZED + (3 if op == "rmsnorm_add" else 0),
                params=dict.fromkeys(params, ParamContract.any_float()),
                metadata={"package": "triton"},
            )
        )
