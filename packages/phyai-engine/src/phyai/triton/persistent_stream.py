"""The warp of the persistent decoder kernel that copies weights; see `persistent_kernel`.

It knows nothing of barriers between programs: it follows the phases in their order, as far ahead of
them as the ring of slots allows. Importing needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from phyai.triton.persistent_tiles import BLOCK_K, SLOTS, stream_tile

PHASES = gl.constexpr(6)
"""Of one layer."""
NARROW, WIDE = gl.constexpr(32), gl.constexpr(64)
"""Weight rows of a tile: the second of the gate/up product, the first of all others."""


@gluon.jit
def _address(table, layer, index: gl.constexpr):
    address = gl.load(table + layer * 4 + index)
    return gl.multiple_of(address.to(gl.pointer_type(gl.bfloat16)), 16)


@gluon.jit
def _stream_parts(
    weight, program, programs, ring, ready, empty, used, WIDTH: gl.constexpr, DEPTH: gl.constexpr,
    SPLITS: gl.constexpr,
):  # fmt: skip
    """Copy this program's tiles of a product that is split over its depth."""
    COLUMNS: gl.constexpr = WIDTH // NARROW
    PART: gl.constexpr = DEPTH // SPLITS
    for item in range(program, COLUMNS * SPLITS, programs):
        used = stream_tile(
            weight, DEPTH, item % COLUMNS * NARROW, NARROW // 2, item // COLUMNS * PART, ring,
            ready, empty, used, PART // BLOCK_K,
        )  # fmt: skip
    return used


@gluon.jit
def stream(
    weights, ring, ready, empty, begin, end, WIDTH: gl.constexpr, MLP: gl.constexpr,
    HEADS: gl.constexpr, DIM: gl.constexpr, OUT_SPLITS: gl.constexpr, DOWN_SPLITS: gl.constexpr,
) -> None:  # fmt: skip
    """Copy the weights of this program's tiles, phase after phase."""
    narrow = ring._reinterpret(gl.bfloat16, [SLOTS, NARROW, BLOCK_K], ring.layout)
    HEAD_TILES: gl.constexpr = DIM // NARROW
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    used = 0
    for layer in range(begin // PHASES, (end + PHASES - 1) // PHASES):
        phase = layer * PHASES
        qkv, out = _address(weights, layer, 0), _address(weights, layer, 1)
        up, down = _address(weights, layer, 2), _address(weights, layer, 3)
        if (phase >= begin) & (phase < end):
            for tile in range(program, (HEADS + 2) * HEAD_TILES, programs):
                first = tile // HEAD_TILES * DIM + tile % HEAD_TILES * (NARROW // 2)
                used = stream_tile(
                    qkv, WIDTH, first, DIM // 2, 0, narrow, ready, empty, used,
                    WIDTH // BLOCK_K,
                )  # fmt: skip
        if (phase + 3 >= begin) & (phase + 3 < end):
            used = _stream_parts(
                out, program, programs, narrow, ready, empty, used, WIDTH, HEADS * DIM, OUT_SPLITS
            )
        if (phase + 4 >= begin) & (phase + 4 < end):
            for tile in range(program, 2 * MLP // WIDE, programs):
                used = stream_tile(
                    up, WIDTH, tile * (WIDE // 2), MLP, 0, ring, ready, empty, used,
                    WIDTH * 2 // BLOCK_K,
                )  # fmt: skip
        if (phase + 5 >= begin) & (phase + 5 < end):
            used = _stream_parts(
                down, program, programs, narrow, ready, empty, used, WIDTH, MLP, DOWN_SPLITS
            )
