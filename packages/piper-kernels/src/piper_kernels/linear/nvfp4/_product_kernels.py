"""Kernels that multiply dense inputs by NVFP4 weights. Importing needs Triton.

A tile of weights is decoded exactly into the dtype of the matrix units and multiplied from
registers, its four nibbles in four products over a quarter of the depth each. Nothing is
interleaved: the input is what is taken apart. Inputs of few rows are split in the kernel,
inputs of many rows were arranged by ``_operand_kernels``: within 64 features, feature
``4 * i + p`` at position ``16 * p + i``.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from piper_kernels._triton.nvfp4 import scale_offsets
from piper_kernels._triton.nvfp4_operands import decode_words, operand_factor


@triton.jit
def _product_level(input_level, weight_level, LEVEL_X: tl.constexpr, LEVEL_W: tl.constexpr):
    """Return the product of the second scale levels that there are."""
    level = 1.0
    if LEVEL_X:
        level = tl.load(input_level)
    if LEVEL_W:
        level = level * tl.load(weight_level)
    return level


@triton.jit
def _store_result(
    result,
    level,
    bias,
    out,
    rows,
    columns,
    total_rows,
    outputs,
    bias_stride,
    out_row_stride,
    BIAS: tl.constexpr,
):
    """Store ``result * level + bias``, rounded once, of FP32 ``[ROWS, OUTPUTS]``."""
    value = result * level
    if BIAS:
        loaded = tl.load(bias + columns * bias_stride, mask=columns < outputs, other=0.0)
        value += loaded.to(tl.float32)[None, :]
    tl.store(
        out + rows.to(tl.int64)[:, None] * out_row_stride + columns[None, :],
        value.to(out.dtype.element_ty),
        mask=(rows < total_rows)[:, None] & (columns < outputs)[None, :],
    )


@triton.jit
def _input_parts(
    source,
    row_starts,
    first,
    width,
    DEPTH: tl.constexpr,
    DTYPE: tl.constexpr,
    ARRANGED: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Return four ``[ROWS, DEPTH / 4]``: the features that meet each nibble of a word."""
    ROWS: tl.constexpr = row_starts.shape[0]
    WORDS: tl.constexpr = DEPTH // 4
    if ARRANGED:
        index = tl.arange(0, WORDS)
        columns = first + (index // 16) * 64 + index % 16
        start = source + row_starts[:, None] + columns[None, :]
        if EVEN:
            x0 = tl.load(start)
            x1 = tl.load(start + 16)
            x2 = tl.load(start + 32)
            x3 = tl.load(start + 48)
        else:
            mask = (columns < width)[None, :]
            x0 = tl.load(start, mask=mask, other=0.0)
            x1 = tl.load(start + 16, mask=mask, other=0.0)
            x2 = tl.load(start + 32, mask=mask, other=0.0)
            x3 = tl.load(start + 48, mask=mask, other=0.0)
    else:
        columns = first + tl.arange(0, DEPTH)
        start = source + row_starts[:, None] + columns[None, :]
        if EVEN:
            dense = tl.load(start)
        else:
            dense = tl.load(start, mask=(columns < width)[None, :], other=0.0)
        even, odd = tl.split(tl.reshape(dense, (ROWS, WORDS, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
    return x0.to(DTYPE), x1.to(DTYPE), x2.to(DTYPE), x3.to(DTYPE)


@triton.jit
def product_kernel(
    source,
    words,
    scale,
    input_level,
    weight_level,
    bias,
    out,
    total_rows,
    outputs,
    features,
    width,
    split_depth,
    scale_columns,
    word_row_stride,
    source_row_stride,
    bias_stride,
    out_row_stride,
    input_factor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    ARRANGED: tl.constexpr,
    EVEN: tl.constexpr,
    PARTIAL: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    LEVEL_X: tl.constexpr,
    LEVEL_W: tl.constexpr,
    BIAS: tl.constexpr,
    NATIVE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Multiply one tile over one part of the depth.

    Args:
        source: Pointer to floating ``[total_rows, width]`` with unit column stride, arranged if
            ``ARRANGED``.
        words: Pointer to int16 ``[outputs, features / 4]``, four codes in each.
        scale: Pointer to the E4M3 bytes of the block scales.
        input_level: Pointer to an FP32 factor; read only when ``LEVEL_X``.
        weight_level: Pointer to an FP32 factor; read only when ``LEVEL_W``.
        bias: Pointer to floating ``[outputs]``; read only when ``BIAS``.
        out: Pointer to the result, or to FP32 ``[splits, total_rows, outputs]`` of sums that
            ``finish_kernel`` adds up when ``PARTIAL``.
        total_rows: Rows of the input.
        outputs: Rows of the weight.
        features: Columns of the weight, a multiple of 16.
        width: Columns of ``source``: ``features``, up to a multiple of 64 if ``ARRANGED``.
        split_depth: Features of a part, a multiple of ``DEPTH``.
        scale_columns: See ``scale_offsets``.
        word_row_stride: ``features / 4``; its own argument, for what its divisibility tells.
        source_row_stride: Elements between rows of ``source``.
        bias_stride: Elements between values of ``bias``.
        out_row_stride: Elements between rows of ``out``.
        input_factor: Power of two that ``source`` was divided by.
        ROWS: Rows of the tile.
        OUTPUTS: Outputs of the tile.
        DEPTH: Features of a step, a multiple of 64.
        GROUP: Row tiles that are computed next to each other.
        DTYPE: Dtype of the matrix units.
        PRECISION: ``input_precision`` of an FP32 dot.
        ARRANGED: Whether the input is arranged.
        EVEN: Whether steps cover the depth without a rest.
        PARTIAL: Whether another kernel scales, biases and rounds.
        SWIZZLED: Layout of the block scales.
        HIGH_FIRST: Whether the even feature is the high nibble of a byte.
        LEVEL_X: Whether the input has a second scale level.
        LEVEL_W: Whether the weight has a second scale level.
        BIAS: Whether there is a bias.
        NATIVE: See ``decode_words``.
        FP8: See ``decode_words``.
    """
    WORDS: tl.constexpr = DEPTH // 4
    BLOCKS: tl.constexpr = DEPTH // 16
    program = tl.program_id(0)
    row_tiles = tl.cdiv(total_rows, ROWS)
    output_tiles = tl.cdiv(outputs, OUTPUTS)
    group = program // (GROUP * output_tiles)
    group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
    inside = program % (GROUP * output_tiles)
    rows = (group * GROUP + inside % group_rows) * ROWS + tl.arange(0, ROWS)
    columns = (inside // group_rows) * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(1)

    # Rows past the end read the last one; their results are not stored.
    row_starts = tl.minimum(rows, total_rows - 1).to(tl.int64) * source_row_stride
    weight_rows = tl.minimum(columns, outputs - 1).to(tl.int64)
    word_rows = words + weight_rows[:, None] * word_row_stride
    word_index = tl.arange(0, WORDS)
    block_index = tl.arange(0, BLOCKS)
    start = tl.multiple_of(split * split_depth, DEPTH)
    accumulator = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for offset in range(start, tl.minimum(start + split_depth, features), DEPTH):
        first = tl.multiple_of(offset, DEPTH)
        at = first // 4 + word_index
        block = first // 16 + block_index
        scale_at = scale + scale_offsets(
            weight_rows[:, None], block[None, :], scale_columns, SWIZZLED
        )
        if EVEN:
            packed = tl.load(word_rows + at[None, :])
            scale_bytes = tl.load(scale_at)
        else:
            packed = tl.load(word_rows + at[None, :], mask=(at < word_row_stride)[None, :], other=0)
            scale_bytes = tl.load(scale_at, mask=(block < features // 16)[None, :], other=0)
        x0, x1, x2, x3 = _input_parts(
            source, row_starts, first, width, DEPTH, DTYPE, ARRANGED, EVEN
        )
        w0, w1, w2, w3 = decode_words(packed, scale_bytes, DTYPE, NATIVE, FP8)
        if HIGH_FIRST:
            w0, w1, w2, w3 = w1, w0, w3, w2
        accumulator = tl.dot(w0, tl.trans(x0), accumulator, input_precision=PRECISION)
        accumulator = tl.dot(w1, tl.trans(x1), accumulator, input_precision=PRECISION)
        accumulator = tl.dot(w2, tl.trans(x2), accumulator, input_precision=PRECISION)
        accumulator = tl.dot(w3, tl.trans(x3), accumulator, input_precision=PRECISION)

    result = tl.trans(accumulator)
    if PARTIAL:
        tl.store(
            out
            + (split * total_rows + rows).to(tl.int64)[:, None] * out_row_stride
            + columns[None, :],
            result,
            mask=(rows < total_rows)[:, None] & (columns < outputs)[None, :],
        )
    else:
        # The factors are powers of two, so they change no rounding.
        level = _product_level(input_level, weight_level, LEVEL_X, LEVEL_W)
        level = level * (operand_factor(DTYPE, NATIVE) * input_factor)
        _store_result(
            result,
            level,
            bias,
            out,
            rows,
            columns,
            total_rows,
            outputs,
            bias_stride,
            out_row_stride,
            BIAS,
        )


@triton.jit(do_not_specialize=["total_rows"])
def finish_kernel(
    partials,
    input_level,
    weight_level,
    bias,
    out,
    total_rows,
    outputs,
    bias_stride,
    out_row_stride,
    input_factor,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DTYPE: tl.constexpr,
    LEVEL_X: tl.constexpr,
    LEVEL_W: tl.constexpr,
    BIAS: tl.constexpr,
    NATIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Add the parts of ``product_kernel`` in their order, scale, add the bias and round once.

    ``DEPENDENT`` says that it was launched while the kernel before it still runs.
    """
    if DEPENDENT:
        gdc_wait()
    tiles = tl.cdiv(outputs, OUTPUTS)
    rows = (tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % tiles) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = (rows < total_rows)[:, None] & (columns < outputs)[None, :]
    result = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * total_rows + rows).to(tl.int64)[:, None] * outputs + columns[None, :]
        result += tl.load(partials + at, mask=mask, other=0.0)
    level = _product_level(input_level, weight_level, LEVEL_X, LEVEL_W)
    level = level * (operand_factor(DTYPE, NATIVE) * input_factor)
    _store_result(
        result,
        level,
        bias,
        out,
        rows,
        columns,
        total_rows,
        outputs,
        bias_stride,
        out_row_stride,
        BIAS,
    )
