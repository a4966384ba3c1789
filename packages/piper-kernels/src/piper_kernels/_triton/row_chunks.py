"""How a row is cut into register blocks. Needs neither Triton nor a device."""

from dataclasses import dataclass
from functools import lru_cache

MAX_CHUNK = 16_384
MAX_CHUNKS = 3
MAX_FUSED_WIDTH = MAX_CHUNK * MAX_CHUNKS

_MAX_ONLY_CHUNK = 8_192
_ALWAYS_ONE_CHUNK = 4_096
_MIN_TILE = 2_048  # elements of a program, so that every thread has some


@dataclass(frozen=True)
class RowChunks:
    """Blocks that hold one or more whole rows in the registers of a program.

    Attributes:
        rows: Rows of a program.
        size: Columns of a chunk, a power of two.
        count: Chunks of a row, 1 to 3.
        num_warps: Warps of a program.
    """

    rows: int
    size: int
    count: int
    num_warps: int


@lru_cache(maxsize=1024)
def plan_row_chunks(width: int) -> RowChunks | None:
    """Return the chunks with the least padding for rows of ``width`` columns.

    Rows up to ``MAX_FUSED_WIDTH`` fit; ``None`` stands for a wider row, which has to be read
    twice.
    """
    limit = 1 if width <= _ALWAYS_ONE_CHUNK else MAX_CHUNKS
    candidates = []
    for count in range(1, limit + 1):
        size = 1 << (-(-width // count) - 1).bit_length()
        largest = _MAX_ONLY_CHUNK if count == 1 else MAX_CHUNK
        if size <= largest and (count - 1) * size < width:
            candidates.append((count * size, count, size))
    if not candidates:
        return None
    _, count, size = min(candidates)
    num_warps = 16 if size > _MAX_ONLY_CHUNK else min(8, max(4, size // 512))
    return RowChunks(max(1, _MIN_TILE // size), size, count, num_warps)
