"""What the persistent decoder kernel finds when it starts; see `phyai.triton.persistent_kernel`."""

# ruff: noqa: ANN001  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def enter_kernel(
    x, scale, residual, scaled, squares, counters, width,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, COUNTERS: tl.constexpr,
) -> None:  # fmt: skip
    """Copies one row, scales it for its norm and sums its squares; sets the counters to zero."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    start = row.to(tl.int64) * width
    values = tl.load(x + start + columns, mask=mask, other=0.0)
    tl.store(residual + start + columns, values, mask=mask)
    wide = values.to(tl.float32)
    factors = tl.load(scale + columns, mask=mask, other=0.0)
    result = (wide * (1.0 + factors)).to(scaled.dtype.element_ty)
    tl.store(scaled + start + columns, result, mask=mask)
    part = tl.arange(0, PARTS)
    total = tl.sum(wide * wide, axis=0)
    tl.store(squares + row * PARTS + part, tl.where(part == 0, total, 0.0))
    if row == 0:
        counter = tl.arange(0, COUNTERS)
        tl.store(counters + counter, tl.zeros((COUNTERS,), tl.int32))
