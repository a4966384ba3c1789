"""RMS normalization, rotary embedding, summaries and quantization of projected heads."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from piper_kernels.attention._preparation._code_kernels import TILE
from piper_kernels.attention._preparation._rotation_kernels import signed_hadamard
from piper_kernels.attention._preparation._row_kernels import (
    hadamard_type,
    rotated,
    scales_per_tile,
    store_codes,
)

# How blocks of 64 rows are summarized for routing.
NO_SUMMARY, MINMAX, MEAN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def inverse_rms(low, high, eps, D: tl.constexpr):
    """Return ``rsqrt(mean(row ** 2) + eps)`` of FP32 rows, ``[ROWS, 1]``.

    Args:
        low: ``[ROWS, 64]``, the first features.
        high: ``[ROWS, 64]``, the others; not read unless ``D`` is 128.
        eps: Added to the mean.
        D: 64 or 128.
    """
    squares = low * low
    if D == 128:
        squares += high * high
    return tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / D + eps)


@triton.jit
def _weighted(values, inverse, weight, feature, HAS_WEIGHT: tl.constexpr):
    """Return normalized values of features ``[64]``."""
    values = values * inverse
    if HAS_WEIGHT:
        values = values * tl.load(weight + feature).to(tl.float32)[None, :]
    return values


@triton.jit
def _partners(heads, inverse, weight, feature, ROTARY: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """Return the normalized other features of pairs, read from memory."""
    HALF: tl.constexpr = ROTARY // 2
    partner = tl.where(feature < HALF, feature + HALF, feature - HALF)
    partner = tl.where(feature < ROTARY, partner, feature)
    if HALF % 16 == 0:  # what lies side by side is read with one instruction
        partner = tl.max_contiguous(tl.multiple_of(partner, 16), 16)
    values = tl.load(heads + partner[None, :]).to(tl.float32)
    return _weighted(values, inverse, weight, partner, HAS_WEIGHT)


@triton.jit
def _turned(values, partners, cos, sin, FIRST: tl.constexpr, ROTARY: tl.constexpr):
    """Return features ``FIRST`` to ``FIRST + 63`` after the rotary embedding."""
    feature = FIRST + tl.arange(0, 64)
    HALF: tl.constexpr = ROTARY // 2
    if FIRST + 64 <= ROTARY:
        cosines = tl.load(cos + feature[None, :])
        sines = tl.load(sin + feature[None, :])
    else:
        inside = (feature < ROTARY)[None, :]
        cosines = tl.load(cos + feature[None, :], mask=inside, other=1.0)
        sines = tl.load(sin + feature[None, :], mask=inside, other=0.0)
    if FIRST + 64 <= HALF:
        return values * cosines - partners * sines
    if FIRST < HALF:
        sines = tl.where((feature < HALF)[None, :], -sines, sines)
    return values * cosines + partners * sines


@triton.jit
def load_transformed(
    heads,
    weight,
    cos,
    sin,
    eps,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """Return rows of one head after normalization and rotary embedding, all in FP32.

    Args:
        heads: Pointers ``[ROWS, 1]`` to the first projected feature of the head in each row.
        weight: Pointer to floating ``[D]``; read with ``HAS_WEIGHT``.
        cos: Pointers ``[ROWS, 1]`` to FP32 rows of ``ROTARY`` cosines.
        sin: The same of sines.
        eps: Added to mean squares.
        D: 64 or 128.
        ROTARY: Features with a rotary embedding, even and at most ``D``.
        HAS_WEIGHT: Whether normalized features have a factor.

    Returns:
        Features 0 to 63 and, if ``D`` is 128, features 64 to 127, each ``[ROWS, 64]``.
    """
    column = tl.arange(0, 64)
    low = tl.load(heads + column[None, :]).to(tl.float32)
    high = low
    if D == 128:
        high = tl.load(heads + 64 + column[None, :]).to(tl.float32)
    inverse = inverse_rms(low, high, eps, D)
    low = _weighted(low, inverse, weight, column, HAS_WEIGHT)
    if D == 128:
        high = _weighted(high, inverse, weight, 64 + column, HAS_WEIGHT)
        if ROTARY == 128:  # the halves are each other's partners
            turned = _turned(low, high, cos, sin, 0, ROTARY)
            return turned, _turned(high, low, cos, sin, 64, ROTARY)
    partners = _partners(heads, inverse, weight, column, ROTARY, HAS_WEIGHT)
    low = _turned(low, partners, cos, sin, 0, ROTARY)
    if D == 64:
        high = low
    elif ROTARY > 64:
        partners = _partners(heads, inverse, weight, 64 + column, ROTARY, HAS_WEIGHT)
        high = _turned(high, partners, cos, sin, 64, ROTARY)
    return low, high


@triton.jit
def _store_summary(
    values,
    exists,
    count,
    first,
    second,
    IS_QUERY: tl.constexpr,
    SUMMARY: tl.constexpr,
):
    """Store the summaries of 64 features of a block; pointers ``[64]`` are those of its row.

    Rows that do not exist repeat one that does, which extrema do not see.
    """
    if SUMMARY == MEAN:
        tl.store(first, tl.sum(tl.where(exists, values, 0.0), axis=0) / count)
    elif SUMMARY == MINMAX:
        largest, smallest = tl.max(values, axis=0), tl.min(values, axis=0)
        if IS_QUERY:
            tl.store(first, largest + smallest)
        else:
            tl.store(first, largest)
            tl.store(second, smallest)


@triton.jit
def _store_keys(values, exists, inside, keys, sums):
    """Store 64 features of keys in their dtype, and the sums of what exists."""
    stored = values.to(keys.dtype.element_ty)
    # In another shape, the store does not choose the layout of the loads.
    tl.store(tl.expand_dims(keys, 1), tl.expand_dims(stored, 1), mask=tl.expand_dims(inside, 1))
    tl.store(sums, tl.sum(tl.where(exists, stored.to(tl.float32), 0.0), axis=0))


_SIZES = ["rows", "heads", "program_heads", "first_tile", "first_batch"]


@triton.jit(do_not_specialize=_SIZES)
def encode_heads_kernel(
    source,
    weight,
    cos,
    sin,
    lengths,
    codes,
    scales,
    keys,
    partials,
    first_summary,
    second_summary,
    rows,
    heads,
    program_heads,
    first_tile,
    first_batch,
    eps,
    factor,
    batch_stride,
    row_stride,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_QUERY: tl.constexpr,
    SUMMARY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Normalize, rotate and summarize 64 projected rows of some heads; quantize queries.

    Keys are stored as they are, with their sums, because they are quantized around their mean.
    The grid is tiles of the window, ranges of heads, batches of the window.

    Args:
        source: Floating ``[batches, rows of the window, heads * D]``, features side by side.
        weight: Floating ``[D]``; read with ``HAS_WEIGHT``.
        cos: FP32 ``[rows, ROTARY]`` of the whole sequence.
        sin: Like ``cos``.
        lengths: int32 ``[tiles]``, rows that exist at the front of tiles; read when ``MASKED``.
        codes: int8 ``[B, heads, 64 * tiles, D]``; of queries.
        scales: FP32 ``[B, heads, ...]``, one per group, or per row with several groups.
        keys: Floating ``[B, heads, rows, D]``; of keys.
        partials: FP32 ``[B, heads, tiles, D]``, sums of stored keys.
        first_summary: FP32 ``[B, heads, tiles, D]``: maximum plus minimum of queries, maximum of
            keys, or the mean.
        second_summary: FP32 ``[B, heads, tiles, D]``, minimum of keys with ``MINMAX``.
        rows: Rows of the sequence.
        heads: Heads of the source.
        program_heads: Heads of a program.
        first_tile: Tile of the sequence that the window starts with.
        first_batch: Batch that the window starts with.
        eps: Added to mean squares.
        factor: Factor of the stored scales of queries.
        batch_stride: Elements between batches of the source.
        row_stride: Elements between rows of the source.
        D: 64 or 128.
        ROTARY: Features with a rotary embedding, even and at most ``D``.
        GROUPS: ``(repeats, groups, width)``; see ``_quantization.RowGroups``.
        IS_QUERY: Whether the heads are queries.
        SUMMARY: ``NO_SUMMARY``, ``MINMAX`` or ``MEAN``.
        HAS_WEIGHT: Whether normalized features have a factor.
        MASKED: Whether tiles have lengths.
        WIDE: Whether products are FP32 products, as in the interpreter.
    """
    tile, tiles = first_tile + tl.program_id(0), (rows + TILE - 1) // TILE
    row, column = tl.arange(0, TILE)[:, None], tl.arange(0, 64)
    count = tl.minimum(rows - tile * TILE, TILE)
    if MASKED:
        count = tl.minimum(count, tl.load(lengths + tile))
    exists, kept = row < count, tl.minimum(row, count - 1)
    batch, first_row = tl.program_id(2), tile.to(tl.int64) * TILE
    window_row = (tl.program_id(0) * TILE + kept).to(tl.int64)
    source_rows = source + batch.to(tl.int64) * batch_stride + window_row * row_stride
    position = (first_row + kept) * ROTARY
    cos_rows, sin_rows = cos + position, sin + position
    DTYPE: tl.constexpr = hadamard_type(tl.float32, WIDE)
    if IS_QUERY:
        hadamard_low = signed_hadamard(0, DTYPE)
        if D == 128:
            hadamard_high = signed_hadamard(64, DTYPE)
    first_head = tl.program_id(1) * program_heads
    for head in range(first_head, tl.minimum(first_head + program_heads, heads)):
        lead = (first_batch + batch).to(tl.int64) * heads + head
        low, high = load_transformed(
            source_rows + head * D, weight, cos_rows, sin_rows, eps, D, ROTARY, HAS_WEIGHT
        )
        block = (lead * tiles + tile) * D + column
        first, second = first_summary + block, second_summary + block
        _store_summary(low, exists, count, first, second, IS_QUERY, SUMMARY)
        if D == 128:
            _store_summary(high, exists, count, first + 64, second + 64, IS_QUERY, SUMMARY)
        if IS_QUERY:
            low = rotated(tl.where(exists, low, 0.0), hadamard_low, WIDE, 2)
            if D == 128:
                other = rotated(tl.where(exists, high, 0.0), hadamard_high, WIDE, 2)
                high = low - other
                low = low + other
            SCALES: tl.constexpr = scales_per_tile(GROUPS)
            store_codes(
                low, high, codes + lead * tiles * (TILE * D), scales + lead * tiles * SCALES,
                tile, factor, D, GROUPS, True,
            )  # fmt: skip
        else:
            inside = first_row + row < rows
            target = keys + (lead * rows + first_row + row) * D + column[None, :]
            _store_keys(low, exists, inside, target, partials + block)
            if D == 128:
                _store_keys(high, exists, inside, target + 64, partials + block + 64)
