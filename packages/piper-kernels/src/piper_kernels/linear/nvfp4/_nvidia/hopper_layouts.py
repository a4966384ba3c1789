"""Layouts of the Hopper products of NVFP4 weights. Importing needs Triton with Gluon."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl


@constexpr_function
def _bits(size: int) -> int:
    """Return the binary logarithm of a power of two."""
    return size.bit_length() - 1


@constexpr_function
def word_layout(outputs: int, num_warps: int) -> gl.DistributedLinearLayout:
    """Return the layout of a step's words ``[outputs, 64]``: a lane has 16 of rows r and r + 8."""
    rest = [[16 << bit, 0] for bit in range(_bits(num_warps), _bits(outputs // 16))]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], *rest],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << bit, 0] for bit in range(_bits(num_warps))],
        block_bases=[],
        shape=[outputs, 64],
    )


@constexpr_function
def scale_layout(outputs: int, num_warps: int) -> gl.DistributedLinearLayout:
    """Return the layout of a step's swizzled scales ``[outputs / 8, 32]`` of four bytes.

    Row ``r`` of a tile of 128 has, for its four column tiles ``c``, the words at
    ``[4 * c + r % 32 // 8, r % 8 * 4 + r // 32]``. A lane has those of the rows of its words.
    """
    rows = [[2, 0], [0, 1], [0, 2], [16, 0]][: _bits(outputs // 16)]
    warps = _bits(num_warps)
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], *rows[warps:]],
        lane_bases=[[4, 0], [8, 0], [0, 4], [0, 8], [0, 16]],
        warp_bases=rows[:warps],
        block_bases=[],
        shape=[outputs // 8, 32],
    )


@constexpr_function
def store_layout(outputs: int, rows: int, num_warps: int) -> gl.DistributedLinearLayout:
    """Return a layout of ``[outputs, rows]`` whose threads hold 16 outputs side by side.

    A warp has what it has in the layout of the accumulators.
    """
    columns = [[0, 1 << bit] for bit in range(_bits(rows))]
    rest = [[16 << bit, 0] for bit in range(_bits(num_warps), _bits(outputs // 16))]
    inner = [[1, 0], [2, 0], [4, 0], [8, 0]]
    # Three bits of the lanes are rows; with fewer rows lanes keep outputs.
    spare = 5 - len(columns)
    lanes = columns[:5] if spare <= 0 else [*columns, *inner[3 - spare + 1 : 4]]
    held = inner if spare <= 0 else inner[: 3 - spare + 1]
    return gl.DistributedLinearLayout(
        reg_bases=[*held, *columns[5:], *rest],
        lane_bases=lanes,
        warp_bases=[[16 << bit, 0] for bit in range(_bits(num_warps))],
        block_bases=[],
        shape=[outputs, rows],
    )
