"""Products with small FP32 weights, one program a row: all of the weight fits the caches."""

# ruff: noqa: ANN001  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.triton.rows import flat_rows

_VALUES = 8192
"""Weights that one program holds at a time."""


@triton.jit
def _small_kernel(
    x, weight, bias, out, N, K, x_stride,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = column < N
    depth = tl.arange(0, BLOCK_K)
    values = tl.load(x + row * x_stride + depth, mask=depth < K, other=0.0)
    mask = columns[:, None] & (depth < K)[None, :]
    factors = tl.load(weight + column[:, None] * K + depth[None, :], mask=mask, other=0.0)
    total = tl.sum(factors * values[None, :].to(tl.float32), axis=1)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=columns, other=0.0)
    tl.store(out + row * N + column, total.to(out.dtype.element_ty), mask=columns)


def small_gemm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns ``x Wᵀ + bias`` in the dtype of ``x``, summed in fp32.

    Args:
        x: [..., K].
        weight: fp32 [N, K] with K at most 4096.
        bias: fp32 [N] or None.
    """
    rows = flat_rows(x)
    weight = weight.contiguous()
    out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)
    if out.numel():
        depth = triton.next_power_of_2(rows.shape[1])
        block = min(triton.next_power_of_2(weight.shape[0]), max(1, _VALUES // depth))
        _small_kernel[(rows.shape[0], triton.cdiv(weight.shape[0], block))](
            rows,
            weight,
            None if bias is None else bias.contiguous(),
            out,
            weight.shape[0],
            rows.shape[1],
            rows.stride(0),
            HAS_BIAS=bias is not None,
            BLOCK_N=block,
            BLOCK_K=depth,
            num_warps=8,
        )
    return out
