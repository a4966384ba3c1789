"""A flow's velocity from an expert's last rows in one launch: adaptive norm and projection."""

# ruff: noqa: ANN001  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.triton.rows import flat_rows

_VALUES = 8192
"""Weights that one program holds."""


@triton.jit(do_not_specialize=["eps"])
def _flow_velocity_kernel(
    x, modulation, weight, bias, out, hidden, count, x_stride, eps,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK)
    inside = depth < hidden
    mask = (column < count)[:, None] & inside[None, :]
    factors = tl.load(weight + column[:, None] * hidden + depth[None, :], mask=mask, other=0.0)
    values = tl.load(x + row * x_stride + depth, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(modulation + depth, mask=inside, other=0.0)
    shift = tl.load(modulation + hidden + depth, mask=inside, other=0.0)
    inverse = tl.math.rsqrt(tl.sum(values * values, axis=0) / hidden + eps)
    values = values * inverse * (1.0 + scale) + shift
    total = tl.sum(factors * values[None, :], axis=1)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < count, other=0.0)
    tl.store(out + row * count + column, total, mask=column < count)


def flow_velocity(
    x: Tensor, modulation: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """Returns ``norm(x) Wᵀ + bias`` [..., A] in fp32.

    The norm is ``x / rms(x) * (1 + scale) + shift`` and stays in fp32.

    Args:
        x: [..., width] with width at most 8192.
        modulation: fp32 [1, 3 * width]: scale, shift, and a gate that nothing reads.
        weight: fp32 [A, width].
        bias: fp32 [A] or None.
        eps: of the norm.
    """
    rows, count = flat_rows(x), weight.shape[0]
    out = torch.empty((*x.shape[:-1], count), dtype=torch.float32, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(rows.shape[1])
        columns = min(triton.next_power_of_2(count), max(1, _VALUES // block))
        _flow_velocity_kernel[(rows.shape[0], triton.cdiv(count, columns))](
            rows, modulation.contiguous(), weight.contiguous(),
            None if bias is None else bias.contiguous(), out,
            rows.shape[1], count, rows.stride(0), eps,
            HAS_BIAS=bias is not None, BLOCK_N=columns, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out
