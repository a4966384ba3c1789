"""Norms and modulations whose scale, shift and gate come from a condition.

Each launcher has the contract of its reference row in ``phyai.kernels``. A condition has one row
for each row of ``x`` or is broadcast, and is never expanded in memory.
"""

# ruff: noqa: ANN001  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.triton.rows import flat_rows, row_block


def _condition_rows(condition: Tensor, x: Tensor) -> Tensor:
    """Returns ``condition`` [..., C] as a view [outer, inner, C] over the rows of ``x``."""
    inner = x.shape[-2] if x.ndim > 1 else 1
    lead = x.shape[:-1] if x.ndim > 1 else (1,)
    wide = condition.broadcast_to(*lead, condition.shape[-1])
    wide = wide.reshape(-1, inner, condition.shape[-1])
    return wide if wide.stride(-1) == 1 else wide.contiguous()


@triton.jit(do_not_specialize=["eps"])
def _adaptive_kernel(
    x,
    residual,
    gate,
    modulation,
    out,
    total,
    hidden,
    inner,
    x_stride,
    residual_stride,
    gate_outer,
    gate_inner,
    modulation_outer,
    modulation_inner,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    outer, place = row // inner, row % inner
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    loaded = tl.load(x + row * x_stride + columns, mask=mask, other=0.0)
    values = loaded.to(tl.float32)
    if ADD:
        gates = gate + outer * gate_outer + place * gate_inner + columns
        added = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0)
        values *= tl.load(gates, mask=mask, other=0.0).to(tl.float32)
        stored = (values + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * hidden + columns, stored, mask=mask)
        # The norm reads what is stored, in the dtype of x.
        values = stored.to(loaded.dtype).to(tl.float32)
    condition = modulation + outer * modulation_outer + place * modulation_inner + columns
    scale = tl.load(condition, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(condition + hidden, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.math.rsqrt(tl.sum(values * values, axis=0) / hidden + eps)
    result = values * inverse * (1.0 + scale) + shift
    tl.store(out + row * hidden + columns, result.to(out.dtype.element_ty), mask=mask)


def adarmsnorm(x: Tensor, modulation: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns ``rmsnorm(x) * (1 + scale) + shift`` and the gate, a view of the modulation.

    Args:
        x: [..., H].
        modulation: [..., 3 * H], scale, shift and gate, broadcastable to the rows of ``x``.
        eps: added to the mean square.
    """
    out, _ = _adaptive(x, None, None, modulation, eps)
    return out, modulation[..., 2 * x.shape[-1] :]


def adarmsnorm_add(
    x: Tensor, residual: Tensor, gate: Tensor, modulation: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds ``gate * x`` to the residual and normalises the sum as `adarmsnorm` does.

    Args:
        x: [..., H], a sublayer's output.
        residual: [..., H].
        gate: [..., H] of that sublayer, broadcastable to the rows of ``x``.
        modulation: [..., 3 * H] of the norm.
        eps: added to the mean square.

    Returns:
        The output, the new residual in the dtype of the old one, and the norm's gate.
    """
    out, total = _adaptive(x, residual, gate, modulation, eps)
    return out, total, modulation[..., 2 * x.shape[-1] :]


def _adaptive(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, modulation: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    rows = flat_rows(x)
    add = residual is not None and gate is not None
    added = flat_rows(residual) if add else rows
    condition = _condition_rows(modulation, x)
    gates = _condition_rows(gate, x) if add else condition
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=added.dtype, device=x.device) if add else out
    if out.numel():
        _adaptive_kernel[(rows.shape[0],)](
            rows,
            added,
            gates,
            condition,
            out,
            total,
            rows.shape[1],
            condition.shape[1],
            rows.stride(0),
            added.stride(0),
            gates.stride(0),
            gates.stride(1),
            condition.stride(0),
            condition.stride(1),
            eps,
            ADD=add,
            **row_block(rows.shape[1]),
        )
    return out, total


@triton.jit
def _modulate_kernel(
    x,
    scale,
    shift,
    out,
    hidden,
    inner,
    x_stride,
    scale_outer,
    scale_inner,
    shift_outer,
    shift_inner,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    outer, place = row // inner, row % inner
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0)
    kind = values.dtype
    factors = scale + outer * scale_outer + place * scale_inner + columns
    terms = shift + outer * shift_outer + place * shift_inner + columns
    # Every step is rounded to the dtype, as separate operations would.
    factor = (tl.load(factors, mask=mask, other=0.0).to(tl.float32) + 1.0).to(kind)
    product = (values.to(tl.float32) * factor.to(tl.float32)).to(kind)
    term = tl.load(terms, mask=mask, other=0.0).to(tl.float32)
    result = product.to(tl.float32) + term
    tl.store(out + row * hidden + columns, result.to(kind), mask=mask)


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Returns ``x * (1 + scale) + shift``, rounded after each step.

    Args:
        x: [batch, tokens, H].
        scale: [batch, H] or broadcastable to ``x``, in its dtype.
        shift: as ``scale``.
    """
    if scale.ndim == x.ndim - 1:
        scale, shift = scale.unsqueeze(-2), shift.unsqueeze(-2)
    rows = flat_rows(x)
    factors, terms = _condition_rows(scale, x), _condition_rows(shift, x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _modulate_kernel[(rows.shape[0],)](
            rows,
            factors,
            terms,
            out,
            rows.shape[1],
            factors.shape[1],
            rows.stride(0),
            factors.stride(0),
            factors.stride(1),
            terms.stride(0),
            terms.stride(1),
            **row_block(rows.shape[1]),
        )
    return out
