"""Lists of key tiles of routed attention on Hopper and the warp that copies them, in Gluon.

Importing needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from piper_kernels.attention._sm90_kernels.tiles import PAIR_KEYS, QUERY_ROWS, TILE_KEYS


@gluon.jit
def program_route(
    routes, table, first_block, blocks, heads, routed_blocks, routed_tiles, routes_per_query
):
    """Return batch, head and query block of this program and its list of key tiles.

    The list is ``kept`` tiles at the returned pointer and then all from ``suffix`` on.
    """
    program = gl.program_id(0)
    block = first_block + program % blocks
    sequence = program // blocks
    batch = sequence // heads
    head = sequence % heads
    is_routed = block < routed_blocks
    kept = gl.load(table + head, mask=is_routed, other=0)
    offset = gl.load(table + heads + head, mask=is_routed, other=0)
    suffix = gl.where(is_routed, routed_tiles, 0)
    start = (batch.to(gl.int64) * routed_blocks + block) * routes_per_query
    return batch, head, block, routes + start + offset, kept, suffix


@gluon.jit
def tile_at(route, position, kept, suffix, count):
    """Return the tile at a position of a list; behind its end, the last one."""
    position = gl.minimum(position, count - 1)
    inside = position < kept
    tile = gl.load(route + position, mask=inside, other=0).to(gl.int32)
    return gl.where(inside, tile, suffix + position - kept)


@gluon.jit
def copy_partition(
    q_desc, k_desc, v_desc, q_tile, k_ring, v_ring, q_ready, k_ready, k_empty, v_ready, v_empty,
    routes, table, first_block, blocks, tiles, heads, groups, routed_blocks, routed_tiles,
    routes_per_query, query_tiles,
):  # fmt: skip
    """Fill the ring with the pairs of key tiles on the route of this program."""
    STAGES: gl.constexpr = k_ring.shape[0] // 2
    HEAD_DIM: gl.constexpr = q_tile.shape[1]
    PERMUTED_KEYS: gl.constexpr = len(k_desc.block_type.shape) == 5
    batch, head, block, route, kept, suffix = program_route(
        routes, table, first_block, blocks, heads, routed_blocks, routed_tiles, routes_per_query
    )
    count = kept + tiles - suffix
    sequence = batch * heads + head
    key_head = batch * (heads // groups) + head // groups
    mbarrier.expect(q_ready.index(0), QUERY_ROWS * HEAD_DIM)
    q_row = (sequence * query_tiles + block) * QUERY_ROWS
    tma.async_copy_global_to_shared(q_desc, [q_row, 0], q_ready.index(0), q_tile)
    first = tile_at(route, 0, kept, suffix, count)
    second = tile_at(route, 1, kept, suffix, count)
    for pair in range(gl.cdiv(count, 2)):
        next_first = tile_at(route, pair * 2 + 2, kept, suffix, count)
        next_second = tile_at(route, pair * 2 + 3, kept, suffix, count)
        slot = pair % STAGES
        phase = ((pair // STAGES) & 1) ^ 1
        mbarrier.wait(k_empty.index(slot), phase)
        mbarrier.expect(k_ready.index(slot), PAIR_KEYS * HEAD_DIM)
        for half in gl.static_range(2):
            row = (key_head * tiles + (second if half else first)) * TILE_KEYS
            ready = k_ready.index(slot)
            target = k_ring.index(slot * 2 + half)
            if PERMUTED_KEYS:
                tma.async_copy_global_to_shared(k_desc, [row // 16, 0, 0, 0, 0], ready, target)
            else:
                tma.async_copy_global_to_shared(k_desc, [row, 0], ready, target)
        mbarrier.wait(v_empty.index(slot), phase)
        mbarrier.expect(v_ready.index(slot), PAIR_KEYS * HEAD_DIM)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                v_desc, [key_head * HEAD_DIM, (second if half else first) * TILE_KEYS],
                v_ready.index(slot), v_ring.index(slot * 2 + half),
            )  # fmt: skip
        first = next_first
        second = next_second
