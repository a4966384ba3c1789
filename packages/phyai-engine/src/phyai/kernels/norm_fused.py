"""Norms fused with what stands next to them: a gated residual, a SiLU gate, channels of a map."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import is_set
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.opspec import Impl, OpSpec, ParamContract, Priority
from phyai.kernels.bench import random_tensor
from phyai.kernels.bench_norm import channel_l2_norm_inputs
from phyai.kernels.conditions import returns
from phyai.kernels.norm import adarmsnorm, normalized

_EPS = 1e-6


def adarmsnorm_add(
    x: Tensor, residual: Tensor, gate: Tensor, modulation: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the adaptive norm of ``residual + gate * x``, that sum, and the norm's gate."""
    total = (residual.float() + gate.float() * x.float()).to(residual.dtype)
    out, next_gate = adarmsnorm(total.to(x.dtype), modulation, eps)
    return out, total, next_gate


def layernorm_add(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns the layer norm of ``x + residual`` and that sum."""
    total = (x.float() + residual.float()).to(residual.dtype)
    shift = None if bias is None else bias.float()
    out = functional.layer_norm(total.to(x.dtype).float(), weight.shape, weight.float(), shift, eps)
    return out.to(x.dtype), total


def _rmsnorm_silu_mul(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    gated = functional.silu(gate.float())
    return (normalized(x, eps) * weight.float() * gated).to(x.dtype)


def _channel_l2_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    channel_first: bool,
    compute_dtype: torch.dtype,
) -> Tensor:
    axis = 1 if channel_first else -1
    shape = (-1, *[1] * (x.ndim - 2)) if channel_first else (-1,)
    wide = x.to(compute_dtype)
    length = torch.linalg.vector_norm(wide, dim=axis, keepdim=True).clamp_min(eps)
    out = wide / length * x.shape[axis] ** 0.5 * weight.to(compute_dtype).reshape(shape)
    if bias is not None:
        out = out + bias.to(compute_dtype).reshape(shape)
    return out.to(x.dtype)


def _bench_adaptive(facts: Facts, device: Any) -> tuple[Any, ...]:
    tokens, hidden = facts["shape.tokens"], facts["shape.hidden"]
    x = random_tensor((tokens, hidden), facts["dtype.input"], device)
    residual = random_tensor((tokens, hidden), facts["dtype.residual"], device)
    gate = random_tensor((1, hidden), facts["dtype.gate"], device)
    modulation = random_tensor((1, 3 * hidden), facts["dtype.modulation"], device)
    return x, residual, gate, modulation, _EPS


def _bench_layernorm_add(facts: Facts, device: Any) -> tuple[Any, ...]:
    shape = facts["shape.tokens"], facts["shape.hidden"]
    x = random_tensor(shape, facts["dtype.input"], device)
    residual = random_tensor(shape, facts["dtype.residual"], device)
    weight = random_tensor(shape[1:], facts["dtype.weight"], device)
    bias = None
    if facts.get("attrs.bias") is True:
        bias = random_tensor(shape[1:], facts["dtype.bias"], device)
    return x, residual, weight, bias, _EPS


def _bench_silu_mul(facts: Facts, device: Any) -> tuple[Any, ...]:
    shape = facts["shape.tokens"], facts["shape.hidden"]
    x = random_tensor(shape, facts["dtype.input"], device)
    weight = random_tensor(shape[1:], facts["dtype.weight"], device)
    return x, random_tensor(shape, facts["dtype.input"], device), weight, _EPS


def _declare(catalog: Catalog) -> None:
    catalog.register_op(
        OpSpec(
            name="adarmsnorm_add",
            dims=("tokens", "hidden", "cond_dim"),
            dtypes=("input", "residual", "gate", "modulation"),
            signature="(x, residual, gate, modulation, eps) -> (out, new_residual, next_gate)",
            bench_args=_bench_adaptive,
            doc=(
                "new_residual = residual + gate * x, rounded to its dtype; out and next_gate are "
                "adarmsnorm of it. gate and modulation broadcast against x."
            ),
        )
    )
    catalog.register_op(
        OpSpec(
            name="layernorm_add",
            dims=("tokens", "hidden"),
            dtypes=("input", "weight", "residual"),
            optional_dtypes=("bias",),
            attributes={"bias": FactKind.BOOL},
            signature="(x, residual, weight, bias, eps) -> (y, new_residual)",
            params=("weight", "bias"),
            bench_args=_bench_layernorm_add,
            doc="new_residual = x + residual, rounded to its dtype; y is its layer norm.",
        )
    )
    catalog.register_op(
        OpSpec(
            name="rmsnorm_silu_mul",
            dims=("tokens", "hidden"),
            dtypes=("input", "weight"),
            signature="(x, gate, weight, eps) -> Tensor",
            params=("weight",),
            bench_args=_bench_silu_mul,
            doc="RMS norm of the last axis times weight times silu(gate).",
        )
    )
    catalog.register_op(
        OpSpec(
            name="channel_l2_norm",
            dims=("channels",),
            dtypes=("input", "weight", "compute"),
            optional_dtypes=("bias",),
            attributes={
                "channel_first": FactKind.BOOL,
                "bias": FactKind.BOOL,
                "fused_compatible": FactKind.BOOL,
            },
            signature="(x, weight, bias, eps, *, channel_first, compute_dtype) -> Tensor",
            params=("weight", "bias"),
            bench_args=channel_l2_norm_inputs,
            doc=(
                "x / max(|x|, eps) * sqrt(C) * weight + bias over the channels: axis 1 when "
                "channel_first, else the last. fused_compatible: axis 1 and FP32 arithmetic."
            ),
        )
    )


def populate(catalog: Catalog) -> None:
    """Declares the operations and their reference rows."""
    _declare(catalog)
    anything = ParamContract.any_float()
    for op, function, params in (
        ("adarmsnorm_add", adarmsnorm_add, ()),
        ("layernorm_add", layernorm_add, ("weight", "bias")),
        ("rmsnorm_silu_mul", _rmsnorm_silu_mul, ("weight",)),
        ("channel_l2_norm", _channel_l2_norm, ("weight", "bias")),
    ):
        catalog.register(
            Impl(
                kernel_id=f"torch.{op}",
                op=op,
                when=is_set("dtype.input"),
                prepare=returns(function),
                priority=Priority.REFERENCE,
                reference=True,
                params=dict.fromkeys(params, anything),
            )
        )
