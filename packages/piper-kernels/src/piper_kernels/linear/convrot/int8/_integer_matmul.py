"""Exact INT32 products of INT8 matrices on any device."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from piper_kernels._autocast import full_precision

# 1024 products of magnitude at most 128 * 128 sum to at most 2**24, exact in FP32.
_EXACT_FP32_TERMS = 1024
_int_mm = torch.ops.aten._int_mm.default
_CUDA_MIN_ROWS = 32
_CUDA_ALIGNMENT = 8


def integer_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right.T`` with exact integer accumulation.

    Exact for full-range codes up to ``K = 131071``, where INT32 could overflow.

    Args:
        left: int8 ``[M, K]``.
        right: int8 ``[N, K]``.

    Returns:
        int32 ``[M, N]``.
    """
    if left.is_cuda and 0 not in (*left.shape, *right.shape):
        return _cuda_matmul(left, right)
    if left.device.type == "cpu" and (torch.compiler.is_compiling() or _cpu_int_mm_is_exact()):
        return _int_mm(left, right.t())
    return _float_matmul(left, right)


def _cuda_matmul(left: Tensor, right: Tensor) -> Tensor:
    # cuBLASLt takes more than 16 rows and K and N in multiples of 8.
    rows, columns = left.shape[0], right.shape[0]
    depth_padding = -left.shape[1] % _CUDA_ALIGNMENT
    row_padding = max(_CUDA_MIN_ROWS - rows, 0)
    column_padding = -columns % _CUDA_ALIGNMENT
    if depth_padding or row_padding:
        left = functional.pad(left, (0, depth_padding, 0, row_padding))
    if depth_padding or column_padding:
        right = functional.pad(right, (0, depth_padding, 0, column_padding))
    return _int_mm(left, right.t())[:rows, :columns]


def _float_matmul(left: Tensor, right: Tensor) -> Tensor:
    total = torch.zeros((left.shape[0], right.shape[0]), dtype=torch.int32, device=left.device)
    with full_precision(left.device):
        for start in range(0, left.shape[1], _EXACT_FP32_TERMS):
            columns = slice(start, start + _EXACT_FP32_TERMS)
            terms = left[:, columns].to(torch.float32)
            total += (terms @ right[:, columns].to(torch.float32).t()).to(torch.int32)
    return total


@cache
def _cpu_int_mm_is_exact() -> bool:
    """Try the largest codes once: CPUs without VNNI may saturate 16-bit partial sums."""
    with torch.inference_mode(mode=False), torch.no_grad():
        lowest = torch.full((32, 256), -128, dtype=torch.int8)
        highest = torch.full((32, 256), 127, dtype=torch.int8)
        return all(
            bool((_int_mm(a, b.t()) == int(a[0, 0]) * int(b[0, 0]) * 256).all())
            for a in (lowest, highest)
            for b in (lowest, highest)
        )
