"""RMS and layer norms: one program a row, reduced in FP32.

Each launcher has the contract of its reference row in ``phyai.kernels.norm``.
"""

# ruff: noqa: ANN001  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.triton.rows import flat_rows, row_block


@triton.jit(do_not_specialize=["eps"])
def _rms_kernel(
    x,
    residual,
    weight,
    out,
    total,
    hidden,
    x_stride,
    residual_stride,
    eps,
    GEMMA: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    loaded = tl.load(x + row * x_stride + columns, mask=mask, other=0.0)
    values = loaded.to(tl.float32)
    if ADD:
        added = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0)
        stored = (values + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * hidden + columns, stored, mask=mask)
        # The norm reads what is stored, in the dtype of x.
        values = stored.to(loaded.dtype).to(tl.float32)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if GEMMA:
        scale += 1.0
    inverse = tl.math.rsqrt(tl.sum(values * values, axis=0) / hidden + eps)
    result = values * inverse * scale
    tl.store(out + row * hidden + columns, result.to(out.dtype.element_ty), mask=mask)


def rmsnorm(x: Tensor, weight: Tensor, eps: float, *, gemma: bool = False) -> Tensor:
    """Returns the RMS norm of ``x`` [..., H] times ``weight`` [H], or 1 + weight for Gemma."""
    return _launch(_rms_kernel, x, None, (weight,), eps, GEMMA=gemma)[0]


def rmsnorm_add(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, gemma: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the RMS norm of ``x + residual`` and the sum in the dtype of the residual.

    Args:
        x: [..., H].
        residual: [..., H], same shape.
        weight: [H].
        eps: added to the mean square.
        gemma: whether to multiply by 1 + weight.
    """
    return _launch(_rms_kernel, x, residual, (weight,), eps, GEMMA=gemma)


@triton.jit(do_not_specialize=["eps"])
def _layer_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    total,
    hidden,
    x_stride,
    residual_stride,
    eps,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    loaded = tl.load(x + row * x_stride + columns, mask=mask, other=0.0)
    values = loaded.to(tl.float32)
    if ADD:
        added = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0)
        stored = (values + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * hidden + columns, stored, mask=mask)
        values = stored.to(loaded.dtype).to(tl.float32)
    mean = tl.sum(values, axis=0) / hidden
    centered = tl.where(mask, values - mean, 0.0)
    inverse = tl.math.rsqrt(tl.sum(centered * centered, axis=0) / hidden + eps)
    result = centered * inverse * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + columns, result.to(out.dtype.element_ty), mask=mask)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Returns the layer norm of ``x`` [..., H]; ``bias`` [H] may be None."""
    return _launch(_layer_kernel, x, None, (weight, bias), eps, HAS_BIAS=bias is not None)[0]


def layernorm_add(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns the layer norm of ``x + residual`` and the sum in the dtype of the residual.

    Args:
        x: [..., H].
        residual: [..., H], same shape.
        weight: [H].
        bias: [H] or None.
        eps: added to the variance.
    """
    return _launch(_layer_kernel, x, residual, (weight, bias), eps, HAS_BIAS=bias is not None)


def _launch(
    kernel: Any,
    x: Tensor,
    residual: Tensor | None,
    parameters: Sequence[Tensor | None],
    eps: float,
    **constants: bool,
) -> tuple[Tensor, Any]:
    """Returns the norm of ``x``, or of ``x + residual``, and that sum, None without a residual."""
    rows = flat_rows(x)
    added = None if residual is None else flat_rows(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if added is None else torch.empty(x.shape, dtype=added.dtype, device=x.device)
    if out.numel():
        kernel[(rows.shape[0],)](
            rows,
            added,
            *(None if one is None else one.contiguous() for one in parameters),
            out,
            total,
            rows.shape[1],
            rows.stride(0),
            0 if added is None else added.stride(0),
            eps,
            ADD=added is not None,
            **constants,
            **row_block(rows.shape[1]),
        )
    return out, total


@triton.jit(do_not_specialize=["eps"])
def _silu_mul_kernel(
    x, gate, weight, out, hidden, x_stride, gate_stride, eps, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.math.rsqrt(tl.sum(values * values, axis=0) / hidden + eps)
    result = values * inverse * scale * (gates * tl.sigmoid(gates))
    tl.store(out + row * hidden + columns, result.to(out.dtype.element_ty), mask=mask)


def rmsnorm_silu_mul(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMS norm of ``x`` [..., H] times ``weight`` [H] times the silu of ``gate``."""
    rows, gates = flat_rows(x), flat_rows(gate)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _silu_mul_kernel[(rows.shape[0],)](
            rows,
            gates,
            weight.contiguous(),
            out,
            rows.shape[1],
            rows.stride(0),
            gates.stride(0),
            eps,
            **row_block(rows.shape[1]),
        )
    return out


@triton.jit(do_not_specialize=["eps"])
def _channel_kernel(
    x,
    weight,
    bias,
    out,
    channels,
    positions,
    scale,
    eps,
    HAS_BIAS: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    blocks = tl.cdiv(positions, POSITIONS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    place = (tl.program_id(0) % blocks).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    channel = tl.arange(0, BLOCK)
    mask = (channel < channels)[:, None] & (place < positions)[None, :]
    offsets = (batch * channels + channel[:, None]) * positions + place[None, :]
    values = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(values * values, axis=0)), eps)
    gain = tl.load(weight + channel, mask=channel < channels, other=0.0).to(tl.float32)
    result = values / length[None, :] * (gain * scale)[:, None]
    if HAS_BIAS:
        shift = tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
        result += shift[:, None]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)


def channel_l2_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalises ``x`` [B, C, ...] over C: ``x / max(|x|, eps) * sqrt(C) * weight + bias``."""
    batch, channels = x.shape[:2]
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        positions = x[0, 0].numel()
        block = triton.next_power_of_2(channels)
        width = max(1, min(64, 8192 // block))
        _channel_kernel[(batch * triton.cdiv(positions, width),)](
            x,
            weight.reshape(-1).contiguous(),
            None if bias is None else bias.reshape(-1).contiguous(),
            out,
            channels,
            positions,
            channels**0.5,
            eps,
            HAS_BIAS=bias is not None,
            POSITIONS=width,
            BLOCK=block,
        )
    return out
