"""Norms: RMS (plain and Gemma), RMS with residual add, layer norm, adaptive RMS.

All references reduce and multiply in fp32 and cast the result back to the input's dtype.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import divisible, eq, is_set, one_of
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.opspec import Impl, OpSpec, ParamContract, Priority
from phyai.dispatch.predicate import Predicate, all_of, implies
from phyai.kernels.bench import random_tensor
from phyai.kernels.bench_norm import adarmsnorm_inputs
from phyai.kernels.conditions import FLASHINFER, VECTOR, returns

_EPS = 1e-6
_ANY = ParamContract.any_float()
_VARIANT: Predicate = one_of("attrs.variant", "rms", "gemma", kind=FactKind.STR)


def normalized(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps)`` over the last axis, in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def _rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (normalized(x, eps) * weight.float()).to(x.dtype)


def _gemma_rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (normalized(x, eps) * (1.0 + weight.float())).to(x.dtype)


def _add_then(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def rmsnorm_add(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = (x.float() + residual.float()).to(residual.dtype)
        return norm(total.to(x.dtype), weight, eps), total

    return rmsnorm_add


_RMSNORM = {"rms": _rmsnorm, "gemma": _gemma_rmsnorm}
_RMSNORM_ADD = {variant: _add_then(norm) for variant, norm in _RMSNORM.items()}


def _layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide_bias = None if bias is None else bias.float()
    return functional.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(
        x.dtype
    )


def adarmsnorm(x: Tensor, modulation: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns ``rms(x) * (1 + scale) + shift`` and the gate of ``modulation`` [..., 3 * H]."""
    scale, shift, gate = modulation.chunk(3, dim=-1)
    out = normalized(x, eps) * (1.0 + scale.float()) + shift.float()
    return out.to(x.dtype), gate


def _by_variant(functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    def prepare(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Any]:  # noqa: ARG001
        return functions[facts["attrs.variant"]]

    return prepare


def _flashinfer_rmsnorm(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Any]:  # noqa: ARG001
    from flashinfer.norm import gemma_rmsnorm, rmsnorm

    kernel = gemma_rmsnorm if facts["attrs.variant"] == "gemma" else rmsnorm

    def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return kernel(flat, weight, eps).view(x.shape)

    return run


def _flashinfer_rmsnorm_add(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Any]:
    # The fused kernel works in place. Adding first keeps the inputs and moves less memory than
    # cloning both.
    norm = _flashinfer_rmsnorm(facts, params)

    def run(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total, weight, eps), total

    return run


def _flashinfer_layernorm(facts: Facts, params: Mapping[str, Any]) -> Callable[..., Any]:  # noqa: ARG001
    from flashinfer.norm import layernorm

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        beta = torch.zeros_like(weight) if bias is None else bias
        return layernorm(flat, weight, beta, eps).view(x.shape)

    return run


def _bench_rows(facts: Facts, device: Any) -> tuple[Tensor, Tensor]:
    tokens, hidden = facts["shape.tokens"], facts["shape.hidden"]
    x = random_tensor((tokens, hidden), facts["dtype.input"], device)
    return x, random_tensor((hidden,), facts["dtype.weight"], device)


def _bench_rmsnorm(facts: Facts, device: Any) -> tuple[Any, ...]:
    x, weight = _bench_rows(facts, device)
    return x, weight, _EPS


def _bench_rmsnorm_add(facts: Facts, device: Any) -> tuple[Any, ...]:
    x, weight = _bench_rows(facts, device)
    residual = random_tensor(tuple(x.shape), facts["dtype.residual"], device)
    return x, residual, weight, _EPS


def _bench_layernorm(facts: Facts, device: Any) -> tuple[Any, ...]:
    x, weight = _bench_rows(facts, device)
    bias = None
    if facts.get("attrs.bias") is True:
        bias = random_tensor(tuple(weight.shape), facts["dtype.bias"], device)
    return x, weight, bias, _EPS


def _declare(catalog: Catalog) -> None:
    catalog.register_op(
        OpSpec(
            name="rmsnorm",
            dims=("tokens", "hidden"),
            dtypes=("input", "weight"),
            attributes={"variant": FactKind.STR},
            signature="(x, weight, eps) -> Tensor",
            params=("weight",),
            bench_args=_bench_rmsnorm,
            doc="RMS norm of the last axis; variant gemma multiplies by 1 + weight.",
        )
    )
    catalog.register_op(
        OpSpec(
            name="rmsnorm_add",
            dims=("tokens", "hidden"),
            dtypes=("input", "weight", "residual"),
            attributes={"variant": FactKind.STR},
            signature="(x, residual, weight, eps) -> (y, new_residual)",
            params=("weight",),
            bench_args=_bench_rmsnorm_add,
            doc="new_residual = x + residual, rounded to its dtype; y is its RMS norm.",
        )
    )
    catalog.register_op(
        OpSpec(
            name="layernorm",
            dims=("tokens", "hidden"),
            dtypes=("input", "weight"),
            optional_dtypes=("bias",),
            attributes={"bias": FactKind.BOOL},
            signature="(x, weight, bias, eps) -> Tensor",
            params=("weight", "bias"),
            bench_args=_bench_layernorm,
            doc="Layer norm of the last axis; bias may be None.",
        )
    )
    catalog.register_op(
        OpSpec(
            name="adarmsnorm",
            dims=("tokens", "hidden", "cond_dim"),
            dtypes=("input", "modulation"),
            signature="(x, modulation, eps) -> (out, gate)",
            bench_args=adarmsnorm_inputs,
            doc=(
                "RMS norm times 1 + scale plus shift; modulation [..., 3 * hidden] holds scale, "
                "shift and gate and broadcasts against x. The gate is a view of the modulation."
            ),
        )
    )


def populate(catalog: Catalog) -> None:
    """Declares the norms and their rows."""
    _declare(catalog)
    bf16 = all_of(
        FLASHINFER,
        eq("dtype.input", "bf16"),
        eq("dtype.weight", "bf16"),
        divisible("shape.hidden", VECTOR),
        _VARIANT,
    )
    rows = {
        "rmsnorm": (_RMSNORM, _flashinfer_rmsnorm, bf16),
        "rmsnorm_add": (
            _RMSNORM_ADD,
            _flashinfer_rmsnorm_add,
            all_of(bf16, eq("dtype.residual", "bf16")),
        ),
    }
    for op, (functions, prepare, when) in rows.items():
        catalog.register(
            Impl(
                kernel_id=f"flashinfer.{op}",
                op=op,
                when=when,
                prepare=prepare,
                priority=Priority.OPTIMIZED + 2,
                params={"weight": ParamContract.matches_activation()},
                metadata={"package": "flashinfer-python"},
            )
        )
        catalog.register(
            Impl(
                kernel_id=f"torch.{op}",
                op=op,
                when=all_of(is_set("dtype.input"), _VARIANT),
                prepare=_by_variant(functions),
                priority=Priority.REFERENCE,
                reference=True,
                params={"weight": _ANY},
            )
        )
    _populate_layernorm(catalog)
    catalog.register(
        Impl(
            kernel_id="torch.adarmsnorm",
            op="adarmsnorm",
            when=is_set("dtype.input"),
            prepare=returns(adarmsnorm),
            priority=Priority.REFERENCE,
            reference=True,
        )
    )


def _populate_layernorm(catalog: Catalog) -> None:
    fp32 = ParamContract.fixed("fp32")
    has_bias = eq("attrs.bias", True, FactKind.BOOL)
    catalog.register(
        Impl(
            kernel_id="flashinfer.layernorm",
            op="layernorm",
            when=all_of(
                FLASHINFER,
                divisible("shape.hidden", VECTOR),
                eq("dtype.input", "bf16"),
                eq("dtype.weight", "fp32"),
                implies(has_bias, eq("dtype.bias", "fp32")),
            ),
            prepare=_flashinfer_layernorm,
            priority=Priority.OPTIMIZED + 2,
            params={"weight": fp32, "bias": fp32},
            metadata={"package": "flashinfer-python"},
        )
    )
    catalog.register(
        Impl(
            kernel_id="torch.layernorm",
            op="layernorm",
            when=is_set("dtype.input"),
            prepare=returns(_layernorm),
            priority=Priority.REFERENCE,
            reference=True,
            params={"weight": _ANY, "bias": _ANY},
        )
    )
