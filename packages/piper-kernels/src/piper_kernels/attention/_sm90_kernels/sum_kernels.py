"""Sums of the value codes of tiles, what signed products need to know about unsigned codes."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def tile_sum_kernel(codes, sums, tiles, D: tl.constexpr):
    """Write 128 times the sum of the 64 codes of every feature of a tile.

    Args:
        codes: int8 ``[heads, D, 64 * tiles]``, contiguous.
        sums: int32 ``[heads, tiles, D]``, contiguous.
        tiles: Tiles of a head; the grid is ``(tiles, heads)``.
        D: Features.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    feature = tl.arange(0, D)
    key = tl.arange(0, 64)
    row = (head * D + feature) * tiles * 64
    values = tl.load(codes + row[:, None] + (tile * 64 + key)[None, :])
    total = tl.sum(values.to(tl.int32), axis=1) * 128
    tl.store(sums + (head * tiles + tile) * D + feature, total)
