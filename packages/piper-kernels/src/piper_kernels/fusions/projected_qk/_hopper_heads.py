"""Normalization, rotary embedding and Hadamard rotation in the registers of accumulators, in Gluon.

A block is 64 rows of one head, FP32 ``[64, D]``, whose threads hold what integer WGMMA leaves them:
features 16 apart are values of one thread, so pairs of features and most stages of the Hadamard
rotation need no exchange. Importing needs a Triton with Gluon.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportAssignmentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from piper_kernels.attention._signed_hadamard import SIGN_WORDS

# How blocks are summarized for routing.
NO_SUMMARY, MINMAX, MEAN = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
# Features of a piece, within which pairs of a rotary embedding never lie.
PIECE = gl.constexpr(16)
# Cosines or sines of a row in one tile of shared memory.
ANGLES = gl.constexpr(64)

_WORD_0 = gl.constexpr(SIGN_WORDS[0])
_WORD_1 = gl.constexpr(SIGN_WORDS[1])
_WORD_2 = gl.constexpr(SIGN_WORDS[2])
_WORD_3 = gl.constexpr(SIGN_WORDS[3])


@gluon.jit
def row_halves(x):
    """Return the upper and the lower rows of a tile."""
    ROWS: gl.constexpr = x.shape[0]
    halves = gl.permute(gl.reshape(x, [2, ROWS // 2, x.shape[1]]), [1, 2, 0])
    return gl.split(halves)


@gluon.jit
def column_halves(x):
    """Return the first and the last columns of a tile."""
    COLUMNS: gl.constexpr = x.shape[1]
    halves = gl.permute(gl.reshape(x, [x.shape[0], 2, COLUMNS // 2]), [0, 2, 1])
    return gl.split(halves)


@gluon.jit
def _joined(first, last):
    """Undo ``column_halves``."""
    COLUMNS: gl.constexpr = first.shape[1]
    halves = gl.permute(gl.join(first, last), [0, 2, 1])
    return gl.reshape(halves, [first.shape[0], 2 * COLUMNS])


@gluon.jit
def _quarters(x):
    first, last = column_halves(x)
    return column_halves(first) + column_halves(last)


@gluon.jit
def _pieces(x):
    """Return the pieces of 16 features of a block, 4 or 8 of them."""
    if x.shape[1] == 4 * PIECE:
        pieces = _quarters(x)
    else:
        first, last = column_halves(x)
        pieces = _quarters(first) + _quarters(last)
    return pieces


@gluon.jit
def _whole(pieces, LAYOUT: gl.constexpr):
    """Undo ``_pieces``; ``LAYOUT`` is that of the block."""
    first = _joined(_joined(pieces[0], pieces[1]), _joined(pieces[2], pieces[3]))
    if len(pieces) == 8:
        last = _joined(_joined(pieces[4], pieces[5]), _joined(pieces[6], pieces[7]))
        first = _joined(first, last)
    return gl.convert_layout(first, LAYOUT, assert_trivial=True)


@gluon.jit
def _turned_piece(pieces, INDEX: gl.constexpr, cos_tiles, sin_tiles, ROTARY: gl.constexpr):
    """Return a piece after the rotary embedding."""
    HALF: gl.constexpr = ROTARY // (2 * PIECE)
    TILE_PIECES: gl.constexpr = ANGLES // PIECE
    piece = pieces[INDEX]
    if INDEX < 2 * HALF:
        layout: gl.constexpr = piece.type.layout
        FIRST: gl.constexpr = INDEX % TILE_PIECES * PIECE
        cosines = cos_tiles[INDEX // TILE_PIECES].slice(FIRST, PIECE, dim=1).load(layout)
        sines = sin_tiles[INDEX // TILE_PIECES].slice(FIRST, PIECE, dim=1).load(layout)
        if INDEX < HALF:
            piece = piece * cosines - pieces[INDEX + HALF] * sines
        else:
            piece = piece * cosines + pieces[INDEX - HALF] * sines
    return piece


@gluon.jit
def normalized_and_turned(
    x,
    weight,
    cos_tiles,
    sin_tiles,
    eps,
    ROTARY: gl.constexpr,
    HAS_WEIGHT: gl.constexpr,
):
    """Return a block after RMS normalization and rotary embedding; nothing is rounded.

    Args:
        x: FP32 ``[64, D]``.
        weight: Pointer to floating ``[D]``; read with ``HAS_WEIGHT``.
        cos_tiles: Shared memory, FP32 ``[64, 64]`` for every 64 cosines of the rows.
        sin_tiles: The same of sines.
        eps: Added to mean squares.
        ROTARY: Features with a rotary embedding, a multiple of 32 and at most ``D``.
        HAS_WEIGHT: Whether normalized features have a factor.
    """
    D: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    inverse = gl.rsqrt(gl.sum(x * x, axis=1) / D + eps)
    x = x * gl.expand_dims(inverse, 1)
    if HAS_WEIGHT:
        feature = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
        x = x * gl.expand_dims(gl.load(weight + feature).to(gl.float32), 0)
    pieces = _pieces(x)
    turned = ()
    for index in gl.static_range(D // PIECE):
        piece = _turned_piece(pieces, index, cos_tiles, sin_tiles, ROTARY)
        turned = turned + (piece,)  # noqa: RUF005  # no unpacking in kernels
    return _whole(turned, layout)


@gluon.jit
def _signed(x):
    """Negate the features of a block whose sign is minus."""
    D: gl.constexpr = x.shape[1]
    feature = gl.arange(0, D, layout=gl.SliceLayout(0, x.type.layout))
    word = gl.where(feature < 32, _WORD_0, _WORD_1)
    if D == 128:
        word = gl.where(feature < 64, word, gl.where(feature < 96, _WORD_2, _WORD_3))
    # The copy hides that words are the same for every block: signs would stay in registers.
    word = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [word.to(gl.uint32)], dtype=gl.uint32, is_pure=False, pack=1
    )
    negative = ((word >> (feature & 31).to(gl.uint32)) & 1) == 0
    flipped = negative.to(gl.int32) << 31
    bits = x.to(gl.int32, bitcast=True) ^ gl.expand_dims(flipped, 0)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _stage(x, BIT: gl.constexpr):
    """Return a block after the butterflies of features ``1 << BIT`` apart."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    APART: gl.constexpr = 1 << BIT
    layout: gl.constexpr = x.type.layout
    pairs = gl.reshape(x, [ROWS, COLUMNS // (2 * APART), 2, APART])
    if BIT == 1 or BIT == 2:  # noqa: PLR1714  # no sets in kernels
        # Four threads share 8 features: the sum of both is there, and the second is taken off.
        inner: gl.constexpr = gl.SliceLayout(3, pairs.type.layout)
        which = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, inner)))
        factor = which.to(gl.float32) * -2.0
        factor = gl.expand_dims(gl.expand_dims(gl.expand_dims(factor, 0), 1), 3)
        pairs = pairs * factor + gl.expand_dims(gl.sum(pairs, axis=2), 2)
    else:
        first, second = gl.split(gl.permute(pairs, [0, 1, 3, 2]))
        pairs = gl.permute(gl.join(first + second, first - second), [0, 1, 3, 2])
    return gl.convert_layout(gl.reshape(pairs, [ROWS, COLUMNS]), layout, assert_trivial=True)


@gluon.jit
def rotated(x):
    """Return ``(x * signs) @ H_D`` of a block, without the factor ``1 / sqrt(D)``."""
    D: gl.constexpr = x.shape[1]
    x = _signed(x)
    for bit in gl.static_range(6):
        x = _stage(x, bit)
    if D == 128:
        x = _stage(x, 6)
    return x


@gluon.constexpr_function
def _column_layout(columns):
    """Return a layout of ``[32, columns]`` in which no warp needs columns of another one."""
    return gl.BlockedLayout([1, 4], [512 // columns, columns // 16], [1, 4], [1, 0])


@gluon.jit
def _reduced(x, OPERATION: gl.constexpr):
    if OPERATION == "max":
        x = gl.max(x, axis=0)
    elif OPERATION == "min":
        x = gl.min(x, axis=0)
    else:
        x = gl.sum(x, axis=0)
    return x


@gluon.jit
def _pairs(x, OPERATION: gl.constexpr):
    """Reduce the rows of a block that are 8 apart, which threads have, to ``[32, D]``."""
    D: gl.constexpr = x.shape[1]
    rows = gl.permute(gl.reshape(x, [4, 2, 8, D]), [1, 0, 2, 3])
    return gl.reshape(_reduced(rows, OPERATION), [32, D])


@gluon.jit
def _over_pairs(x, OPERATION: gl.constexpr):
    """Reduce the rows of ``[32, D]``."""
    layout: gl.constexpr = _column_layout(x.shape[1])
    return _reduced(gl.convert_layout(x, layout), OPERATION)


@gluon.jit
def over_rows(x, OPERATION: gl.constexpr):
    """Return the ``"max"``, ``"min"`` or ``"sum"`` of the columns of a block, ``[D]``.

    Threads reduce the two rows they have. Rows of other threads come through shared memory, with
    a quarter of the instructions that exchanges within warps would take.
    """
    return _over_pairs(_pairs(x, OPERATION), OPERATION)


@gluon.jit
def store_columns(target, values):
    """Store ``[D]`` at a pointer."""
    feature = gl.arange(0, values.shape[0], layout=values.type.layout)
    gl.store(target + feature, values)


@gluon.jit
def store_summary(
    x,
    exists,
    count,
    first,
    second,
    IS_QUERY: gl.constexpr,
    SUMMARY: gl.constexpr,
):
    """Store the summaries of a block at pointers to ``[D]``.

    Args:
        x: FP32 ``[64, D]``.
        exists: Which rows exist, ``[64, 1]``.
        count: How many rows do.
        first: The mean, the maximum of keys, or maximum plus minimum of queries.
        second: The minimum of keys.
        IS_QUERY: Whether the rows are queries.
        SUMMARY: ``NO_SUMMARY``, ``MINMAX`` or ``MEAN``.
    """
    if SUMMARY == MEAN:
        store_columns(first, over_rows(gl.where(exists, x, 0.0), "sum") / count.to(gl.float32))
    elif SUMMARY == MINMAX:
        if count < x.shape[0]:
            largest = _pairs(gl.where(exists, x, float("-inf")), "max")
            smallest = _pairs(gl.where(exists, x, float("inf")), "min")
        else:
            largest, smallest = _pairs(x, "max"), _pairs(x, "min")
        largest, smallest = _over_pairs(largest, "max"), _over_pairs(smallest, "min")
        if IS_QUERY:
            store_columns(first, largest + smallest)
        else:
            store_columns(first, largest)
            store_columns(second, smallest)
