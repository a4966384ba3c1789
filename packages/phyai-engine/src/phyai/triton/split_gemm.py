"""Products of fp32 operands on matrix units, each operand split into two TF32 numbers.

Three of the four products of the parts are summed; the fourth is below the last bit of the sum.
"""

# ruff: noqa: ANN001  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.triton.rows import flat_rows

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 32
GRAIN = 4
"""Values of one 16-byte access; K is a multiple."""


@triton.jit
def _split_kernel(
    x, weight, bias, out, M, N, K: tl.constexpr, x_stride: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    left = x + row[:, None].to(tl.int64) * x_stride + depth[None, :]
    right = weight + column[None, :].to(tl.int64) * K + depth[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        inside = start + depth < K
        values = tl.load(left + start, mask=(row < M)[:, None] & inside[None, :], other=0.0)
        factors = tl.load(right + start, mask=(column < N)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(values, factors, total, input_precision="tf32x3")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < N, other=0.0)[None, :]
    target = out + row[:, None].to(tl.int64) * N + column[None, :]
    tl.store(target, total, mask=(row < M)[:, None] & (column < N)[None, :])


def split_gemm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns ``x Wᵀ + bias`` [..., N] in fp32.

    Args:
        x: fp32 [..., K], K a multiple of 4.
        weight: fp32 [N, K], contiguous.
        bias: fp32 [N] or None.
    """
    rows = flat_rows(x)
    if rows.stride(0) % GRAIN or rows.data_ptr() % 16:
        rows = rows.clone(memory_format=torch.contiguous_format)
    columns, depth = weight.shape
    out = torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (triton.cdiv(rows.shape[0], BLOCK_M), triton.cdiv(columns, BLOCK_N))
        _split_kernel[grid](
            rows, weight, None if bias is None else bias.contiguous(), out,
            rows.shape[0], columns, depth, rows.stride(0), HAS_BIAS=bias is not None,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out
