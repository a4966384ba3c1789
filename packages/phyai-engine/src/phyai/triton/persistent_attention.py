"""The attention of the persistent decoder kernel: chunks of keys, and their merge.

Both read what other programs stored before the last barrier past the first-level cache. Importing
needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN201  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from phyai.triton.persistent_tiles import (
    BLOCK_M,
    ROWS_64,
    barrier,
    no_sums,
    store_rows,
)

CHUNK = gl.constexpr(64)
"""Keys of one item of the attention."""
MERGED_ROWS = gl.constexpr(4)
"""Rows that one program joins at a time, one a warp."""
MERGED_PARTS = gl.constexpr(16)
"""Chunks of them that it joins at a time."""
_MERGED = gl.constexpr(gl.BlockedLayout([16, 1, 8], [1, 1, 32], [1, 4, 1], [2, 1, 0]))


@gluon.jit
def key_span(item, segments, tiles, splits):
    """Return what an item of the attention is: its request, tile and chunk and the chunk's slots.

    The numbers are the first query row of the request, their number, the tile, the chunk, its first
    key and the one behind its last, and what makes slots of keys of the first and second run.
    """
    tile = item % tiles
    split = (item // tiles) % splits
    entry = segments + (item // (tiles * splits)) * 6
    first_row, count = gl.load(entry), gl.load(entry + 1)
    start, length = gl.load(entry + 2), gl.load(entry + 3)
    second = gl.load(entry + 4) - length
    low = split * CHUNK
    high = gl.minimum(length + gl.load(entry + 5), low + CHUNK)
    return first_row, count, tile, split, low, high, start, second, length


@gluon.jit
def are_old(low, high, start, second, length, first_slot, rows):
    """Return whether none of a chunk's keys is stored by this launch."""
    end = first_slot + rows
    in_first = gl.minimum(high, length)
    in_second = gl.maximum(low, length)
    new_first = (low < in_first) & (start + low < end) & (start + in_first > first_slot)
    new_second = (in_second < high) & (second + in_second < end) & (second + high > first_slot)
    return (low < high) & ((new_first | new_second) == 0)


@gluon.jit
def copy_keys(keys, values, low, high, start, second, length, pages) -> None:
    """Start to copy a chunk of keys and of values; slots behind its end become zeros.

    ``pages`` [3, CHUNK, DIM] are room for queries, the keys and the values.
    """
    DIM: gl.constexpr = pages.shape[2]
    index = low + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, ROWS_64))
    place = gl.arange(0, DIM, layout=gl.SliceLayout(0, ROWS_64))
    seen = gl.expand_dims(index < high, 1)
    slot = index + gl.where(index < length, start, second)
    source = gl.expand_dims(slot * DIM, 1) + gl.expand_dims(place, 0)
    async_copy.async_copy_global_to_shared(pages.index(1), keys + source, mask=seen)
    async_copy.async_copy_global_to_shared(pages.index(2), values + source, mask=seen)
    async_copy.commit_group()


@gluon.jit
def attend(
    query, partial, heights, first_row, count, tile, split, low, high, total_rows, scale,
    pages, columns, GROUP: gl.constexpr,
) -> None:  # fmt: skip
    """One tile of (token, head) rows against one chunk of keys, which is being copied.

    ``columns`` [3 * DIM / CHUNK, CHUNK, CHUNK] are the ``pages`` in blocks of columns.
    """
    DIM: gl.constexpr = pages.shape[2]
    row = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROWS_64))
    place = gl.arange(0, DIM, layout=gl.SliceLayout(0, ROWS_64))
    first = first_row * GROUP
    source = query + gl.expand_dims((first + row) * DIM, 1) + gl.expand_dims(place, 0)
    inside = gl.expand_dims(row < count * GROUP, 1)
    async_copy.async_copy_global_to_shared(pages.index(0), source, mask=inside)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    token = warpgroup_mma(
        pages.index(0), pages.index(1).permute((1, 0)), no_sums(CHUNK), is_async=True
    )
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(token,))
    layout: gl.constexpr = scores.type.layout
    # Powers of two are faster than powers of e.
    factor = scale * 1.4426950408889634
    index = low + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))
    scores = gl.where(gl.expand_dims(index < high, 0), scores * factor, float("-inf"))
    top = gl.max(scores, axis=1)
    share = gl.exp2(scores - gl.expand_dims(top, 1))
    weight = gl.sum(share, axis=1)
    left = gl.convert_layout(
        share.to(query.dtype.element_ty),
        gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2),
    )
    VALUES: gl.constexpr = 2 * DIM // CHUNK
    first_sums = warpgroup_mma(left, columns.index(VALUES), no_sums(CHUNK), is_async=True)
    second_sums = warpgroup_mma(left, columns.index(VALUES + 1), no_sums(CHUNK), is_async=True)
    third_sums = warpgroup_mma(left, columns.index(VALUES + 2), no_sums(CHUNK), is_async=True)
    fourth_sums = warpgroup_mma(left, columns.index(VALUES + 3), no_sums(CHUNK), is_async=True)
    inverse = gl.expand_dims(1.0 / weight, 1)
    member = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    target = split * total_rows + first
    gl.store(heights + target + member, top + gl.log2(weight), mask=member < count * GROUP)
    sums = warpgroup_mma_wait(
        num_outstanding=0, deps=(first_sums, second_sums, third_sums, fourth_sums)
    )
    rest = count * GROUP - tile * BLOCK_M
    for part in gl.static_range(DIM // CHUNK):
        out = partial + (target + tile * BLOCK_M) * DIM + part * CHUNK
        store_rows(sums[part] * inverse, out, DIM, rest, ROWS_64)


@gluon.jit
def mark_empty(heights, first_row, count, tile, split, total_rows, GROUP: gl.constexpr) -> None:
    """Give a chunk without keys no weight when the chunks are joined."""
    member = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROWS_64))
    nothing = gl.full((BLOCK_M,), float("-inf"), gl.float32, gl.SliceLayout(1, ROWS_64))
    target = heights + split * total_rows + first_row * GROUP + member
    gl.store(target, nothing, mask=member < count * GROUP)


@gluon.jit
def merge(item, partial, heights, out, total_rows, splits, DIM: gl.constexpr) -> None:
    """Join the chunks of rows (token, head), each weighted by its sum of exponentials."""
    tile: gl.constexpr = gl.SliceLayout(0, _MERGED)
    row = item * MERGED_ROWS + gl.arange(0, MERGED_ROWS, layout=gl.SliceLayout(1, tile))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, tile))
    offsets = gl.expand_dims(row * DIM, 1) + gl.expand_dims(dim, 0)
    column: gl.constexpr = gl.SliceLayout(2, _MERGED)
    column_dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, _MERGED)))
    heights_row = item * MERGED_ROWS + gl.arange(0, MERGED_ROWS, layout=gl.SliceLayout(0, column))
    top = gl.full((MERGED_ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, tile))
    whole = gl.zeros((MERGED_ROWS,), gl.float32, gl.SliceLayout(1, tile))
    result = gl.zeros((MERGED_ROWS, DIM), gl.float32, tile)
    for begin in range(0, splits, MERGED_PARTS):
        split = begin + gl.arange(0, MERGED_PARTS, layout=gl.SliceLayout(1, column))
        exists = gl.expand_dims(split < splits, 1) & gl.expand_dims(heights_row < total_rows, 0)
        place = gl.expand_dims(split * total_rows, 1) + gl.expand_dims(heights_row, 0)
        found = gl.load(heights + place, mask=exists, other=float("-inf"), cache_modifier=".cg")
        source = gl.expand_dims(place * DIM, 2) + gl.expand_dims(gl.expand_dims(column_dim, 0), 0)
        part = gl.load(
            partial + source, mask=gl.expand_dims(exists, 2), other=0.0, cache_modifier=".cg"
        )
        higher = gl.maximum(top, gl.convert_layout(gl.max(found, axis=0), top.type.layout))
        fade = gl.exp2(top - higher)
        lowered = gl.convert_layout(higher, gl.SliceLayout(0, column))
        share = gl.exp2(found - gl.expand_dims(lowered, 0))
        used = gl.expand_dims(share > 0.0, 2)
        wide = gl.where(used, part.to(gl.float32), 0.0) * gl.expand_dims(share, 2)
        result = result * gl.expand_dims(fade, 1) + gl.sum(wide, axis=0)
        whole = whole * fade + gl.convert_layout(gl.sum(share, axis=0), whole.type.layout)
        top = higher
    result = result / gl.expand_dims(whole, 1)
    inside = gl.expand_dims(row < total_rows, 1)
    gl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)
