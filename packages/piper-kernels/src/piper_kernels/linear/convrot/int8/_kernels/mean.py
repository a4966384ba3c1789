"""Kernel that averages what prepared inputs stand for."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["sequence", "parts"])
def sum_rows_kernel(
    qdata,
    scale,
    block_lengths,
    out,
    sequence,
    features,
    part_rows,
    parts,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Sum the valid rows of one part of a sequence.

    Args:
        qdata: Pointer to contiguous int8 ``[B, sequence, features]``.
        scale: Pointer to contiguous FP32 ``[B, sequence]``.
        block_lengths: Pointer to int32 ``[sequence / 64]``; read only when ``MASKED``.
        out: Pointer to FP32 ``[B, parts, features]``.
        sequence: Rows of a batch.
        features: Columns.
        part_rows: Rows of a part, a multiple of ``ROWS``.
        parts: Parts of a sequence.
        ROWS: Rows of a step.
        COLUMNS: Columns of a program.
        MASKED: Whether only the front of each block of 64 rows is valid.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    column_mask = columns < features
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(part * part_rows, tl.minimum((part + 1) * part_rows, sequence), ROWS):
        position = first + tl.arange(0, ROWS)
        valid = position < sequence
        if MASKED:
            length = tl.load(block_lengths + position // 64, mask=valid, other=0)
            valid &= position % 64 < length
        row = batch * sequence + position
        scales = tl.load(scale + row, mask=valid, other=0.0)
        codes = tl.load(
            qdata + row[:, None] * features + columns[None, :],
            mask=valid[:, None] & column_mask[None, :],
            other=0,
        )
        total += codes.to(tl.float32) * scales[:, None]
    target = out + (batch * parts + part) * features + columns
    tl.store(target, tl.sum(total, axis=0), mask=column_mask)
