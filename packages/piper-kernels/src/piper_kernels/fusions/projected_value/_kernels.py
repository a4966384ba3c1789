"""Quantization and transposition of projected value heads, and the mean of a projection."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from piper_kernels.attention._preparation._code_kernels import TILE, row_mask
from piper_kernels.attention._preparation._value_kernels import PER_TILE, encode_values

_SIZES = ["rows", "heads", "first_tile", "first_batch", "program_tiles", "window_tiles"]


@triton.jit(do_not_specialize=_SIZES)
def encode_projected_values_kernel(
    source,
    words,
    multiplier,
    mean,
    block_mean,
    lengths,
    rows,
    heads,
    first_tile,
    first_batch,
    program_tiles,
    window_tiles,
    batch_stride,
    row_stride,
    D: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_MEANS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Quantize and transpose some tiles of 64 projected rows of one head.

    The grid is ranges of tiles of the window, heads, batches of the window.

    Args:
        source: Floating ``[batches, rows of the window, heads * D]``, features side by side.
        words: Four codes each, int32 ``[B, heads, D, 16 * tiles]``.
        multiplier: FP32 ``[B, heads, 64 * tiles]`` or, per tile, ``[B, heads, tiles]``.
        mean: FP32 ``[B, heads, D]``; read unless values are not centered.
        block_mean: FP32 ``[B, heads, tiles, D]``, means of the rows that exist; written with
            ``BLOCK_MEANS``.
        lengths: int32 ``[tiles]``, rows that exist at the front of tiles; read when ``MASKED``.
        rows: Rows of the sequence.
        heads: Heads of the source.
        first_tile: Tile of the sequence that the window starts with.
        first_batch: Batch that the window starts with.
        program_tiles: Tiles of a program.
        window_tiles: Tiles of the window.
        batch_stride: Elements between batches of the source.
        row_stride: Elements between rows of the source.
        D: 64 or 128.
        VALUES: ``PER_KEY``, ``CENTERED`` or ``PER_TILE`` of ``_preparation``.
        BLOCK_MEANS: Whether means of blocks are stored.
        MASKED: Whether tiles have lengths.
    """
    tiles = (rows + TILE - 1) // TILE
    start = tl.program_id(0) * program_tiles
    first = first_tile + start
    last = first_tile + tl.minimum(start + program_tiles, window_tiles)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    lead = (first_batch + batch) * heads + head
    # Where the first row of the sequence would be.
    origin = tl.cast(first_tile, tl.int64) * TILE * row_stride
    at = source + batch * batch_stride + head * D - origin
    SCALES: tl.constexpr = 1 if VALUES == PER_TILE else TILE
    encode_values(
        at,
        words + lead * tiles * (16 * D),
        multiplier + lead * tiles * SCALES,
        multiplier,
        words,
        mean + lead * D,
        lengths,
        rows,
        row_stride,
        tiles,
        first,
        last,
        D,
        VALUES,
        False,
        False,
        MASKED,
    )
    if BLOCK_MEANS:
        row, feature = tl.arange(0, TILE), tl.arange(0, D)
        for tile in range(first, last):
            exists = row_mask(tile * TILE, rows, lengths, MASKED)
            offsets = (tl.cast(tile, tl.int64) * TILE + row)[:, None] * row_stride
            values = tl.load(at + offsets + feature[None, :], mask=exists[:, None], other=0.0)
            total = tl.sum(values.to(tl.float32), axis=0) / tl.sum(exists.to(tl.float32))
            tl.store(block_mean + (lead * tiles + tile) * D + feature, total)


@triton.jit
def project_mean_kernel(
    input_mean,
    qdata,
    scale,
    bias,
    out,
    outputs,
    features,
    bias_stride,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute ``ROWS`` outputs of the projection of the mean of one batch.

    Args:
        input_mean: FP32 ``[B, features]``.
        qdata: int8 ``[outputs, features]``.
        scale: FP32 ``[outputs]``.
        bias: Floating ``[outputs]``; read with ``HAS_BIAS``.
        out: FP32 ``[B, outputs]``.
        outputs: Outputs of the projection.
        features: Features of its input.
        bias_stride: Elements between biases.
        HAS_BIAS: Whether there is a bias.
        ROWS: Outputs of a program.
        COLUMNS: Features at a time.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch, inside = tl.program_id(1).to(tl.int64), row < outputs
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, features, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        known = column < features
        mean = tl.load(input_mean + batch * features + column, mask=known, other=0.0)
        at = qdata + row.to(tl.int64)[:, None] * features + column[None, :]
        codes = tl.load(at, mask=inside[:, None] & known[None, :], other=0)
        total += codes.to(tl.float32) * mean[None, :]
    values = tl.sum(total, axis=1) * tl.load(scale + row, mask=inside, other=0.0)
    if HAS_BIAS:
        values += tl.load(bias + row * bias_stride, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + batch * outputs + row, values, mask=inside)
