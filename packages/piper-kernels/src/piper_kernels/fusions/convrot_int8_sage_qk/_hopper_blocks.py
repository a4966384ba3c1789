"""Blocks of 64 rows of the product on Hopper become operands of Piper attention, in Gluon.

Importing needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from piper_kernels.fusions.convrot_int8_sage_qk._hopper_epilogue import (
    ROWS,
    store_block_mean,
    store_keys,
    store_queries,
    store_values,
)
from piper_kernels.fusions.projected_qk._hopper_heads import (
    ANGLES,
    column_halves,
    normalized_and_turned,
    store_summary,
)

# What heads are.
QUERIES, KEYS, VALUES = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def angle_tiles(ring, first, LAYOUT: gl.constexpr, TILES: gl.constexpr):
    """Return tiles of angles in consecutive slots of a ring, FP32 ``[64, 64]``."""
    STAGES: gl.constexpr = ring.shape[0]
    tiles = ()
    for index in gl.static_range(TILES):
        slot = ring.index((first + index) % STAGES)
        tile = slot._reinterpret(gl.float32, [ROWS, ANGLES], LAYOUT)
        tiles = tiles + (tile,)  # noqa: RUF005  # no unpacking in kernels
    return tiles


@gluon.jit
def _projected(
    sums,
    head,
    batch,
    tile,
    count,
    x_scale,
    w_scale,
    bias,
    rows,
    heads,
    bias_stride,
    HAS_BIAS: gl.constexpr,
):
    """Return the FP32 projection of 64 rows of a head from their int32 sums ``[64, D]``.

    Rows from ``count`` on are zero before the bias, so nothing of them is infinite.
    """
    D: gl.constexpr = sums.shape[1]
    layout: gl.constexpr = sums.type.layout
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    at = x_scale + batch.to(gl.int64) * rows + (tile * ROWS + row)
    row_scale = gl.load(at, mask=row < count, other=0.0)
    # A tile may end with a head too many.
    first = gl.minimum(head, heads - 1) * D
    column = first + gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    values = sums.to(gl.float32) * gl.expand_dims(row_scale, 1)
    values = values * gl.expand_dims(gl.load(w_scale + column), 0)
    if HAS_BIAS:
        biases = gl.load(bias + column * bias_stride)
        values += gl.expand_dims(biases.to(gl.float32), 0)
    return values


@gluon.jit
def _summarize(
    x,
    lead,
    tile,
    tiles,
    count,
    first_summary,
    second_summary,
    KIND: gl.constexpr,
    SUMMARY: gl.constexpr,
):
    """Store what routing and the coarse residual read of a block."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, x.type.layout))
    exists = gl.expand_dims(row < count, 1)
    at = (lead * tiles + tile) * x.shape[1]
    if KIND == VALUES:
        if SUMMARY:
            store_block_mean(x, exists, count, first_summary + at)
    else:
        first, second = first_summary + at, second_summary + at
        store_summary(x, exists, count, first, second, KIND == QUERIES, SUMMARY)


@gluon.jit
def _store(
    x,
    lead,
    tile,
    tiles,
    count,
    mean,
    codes,
    scales,
    keys,
    partials,
    rows,
    factor,
    KIND: gl.constexpr,
    STORE: gl.constexpr,
):
    """Store a block as what it is."""
    D: gl.constexpr = x.shape[1]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, x.type.layout))
    exists = row < count
    block = lead * tiles + tile
    if KIND == VALUES:
        at = codes + lead * (tiles * ROWS) * D + tile * ROWS
        existing = gl.expand_dims(exists, 1)
        store_values(x, existing, mean + lead * D, at, scales + block, tiles * ROWS, STORE)
    elif KIND == QUERIES:
        at = codes + block * (ROWS * D // 2)
        store_queries(x, exists, at, scales + block * 2, factor, STORE)
    else:
        at = keys + (lead * rows + tile * ROWS) * D
        inside = gl.minimum(rows - tile * ROWS, ROWS)
        store_keys(x, gl.expand_dims(exists, 1), at, partials + block * D, inside, STORE)


@gluon.jit
def encode_block(
    sums,
    first_head,
    batch,
    tile,
    slots,
    x_ring,
    w_ring,
    ready,
    empty,
    x_scale,
    w_scale,
    bias,
    weight,
    mean,
    lengths,
    codes,
    scales,
    keys,
    partials,
    first_summary,
    second_summary,
    rows,
    heads,
    bias_stride,
    eps,
    factor,
    ANGLE_LAYOUT: gl.constexpr,
    KIND: gl.constexpr,
    D: gl.constexpr,
    ROTARY: gl.constexpr,
    SUMMARY: gl.constexpr,
    ANGLE_TILES: gl.constexpr,
    STORE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_WEIGHT: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Encode 64 rows of the heads of a tile; ``slots`` counts the ring's steps before it."""
    STAGES: gl.constexpr = x_ring.shape[0]
    TILE_HEADS: gl.constexpr = sums.shape[1] // D
    tiles = gl.cdiv(rows, ROWS)
    count = gl.minimum(rows - tile * ROWS, ROWS)
    if MASKED:
        count = gl.minimum(count, gl.load(lengths + tile, mask=tile < tiles, other=0))
    parts = (sums,)
    if TILE_HEADS == 2:
        parts = column_halves(sums)
    for index in gl.static_range(ANGLE_TILES):
        step = slots + index
        mbarrier.wait(ready.index(step % STAGES), (step // STAGES) & 1)
    cos_tiles = angle_tiles(x_ring, slots, ANGLE_LAYOUT, ANGLE_TILES)
    sin_tiles = angle_tiles(w_ring, slots, ANGLE_LAYOUT, ANGLE_TILES)
    blocks = ()
    for part in gl.static_range(TILE_HEADS):
        x = _projected(
            parts[part], first_head + part, batch, tile, count, x_scale, w_scale, bias, rows,
            heads, bias_stride, HAS_BIAS,
        )  # fmt: skip
        if KIND != VALUES:
            x = normalized_and_turned(
                x, weight, cos_tiles, sin_tiles, eps, ROTARY, HAS_WEIGHT
            )  # fmt: skip
        blocks = blocks + (x,)  # noqa: RUF005  # no unpacking in kernels
    lead = batch.to(gl.int64) * heads + first_head
    for part in gl.static_range(TILE_HEADS):
        if (tile < tiles) & (first_head + part < heads):
            _summarize(
                blocks[part], lead + part, tile, tiles, count, first_summary, second_summary,
                KIND, SUMMARY,
            )  # fmt: skip
    # What was read has been used by now, so it may be overwritten.
    for index in gl.static_range(ANGLE_TILES if SUMMARY else 0):
        mbarrier.arrive(empty.index((slots + index) % STAGES), count=1)
    for part in gl.static_range(TILE_HEADS):
        if (tile < tiles) & (first_head + part < heads):
            _store(
                blocks[part], lead + part, tile, tiles, count, mean, codes, scales, keys,
                partials, rows, factor, KIND, STORE,
            )  # fmt: skip
    for index in gl.static_range(0 if SUMMARY else ANGLE_TILES):
        mbarrier.arrive(empty.index((slots + index) % STAGES), count=1)
