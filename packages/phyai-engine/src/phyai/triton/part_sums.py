"""Sums of the parts of a product whose columns were shared between programs."""

# ruff: noqa: ANN001  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _sum_parts_kernel(
    parts, bias, out, size, columns,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Add FP32 parts ``[SPLITS, size]`` in their order, and a bias of ``columns``."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    total = tl.load(parts + place, mask=mask, other=0.0)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(parts + part * size + place, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + place % columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


def sum_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Writes the sum of ``parts``, added in their order in fp32, plus ``bias``.

    Args:
        parts: fp32 [P, M, N], contiguous.
        bias: floating [N], contiguous, or None.
        out: [..., N] with M rows, contiguous.
    """
    _sum_parts_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
        parts,
        bias,
        out,
        out.numel(),
        out.shape[-1],
        SPLITS=parts.shape[0],
        HAS_BIAS=bias is not None,
        BLOCK=_BLOCK,
    )
