"""How GGUF rows of a given width are converted. Needs neither Triton nor a device."""

from dataclasses import dataclass

from piper_kernels._triton.row_chunks import RowChunks, plan_row_chunks
from piper_kernels._triton.targets import AcceleratorTarget

MAX_HIP_ROW = 8_192
TILE_COLUMNS = 1_024
MAX_WORKSPACE_BYTES = 1 << 20


@dataclass(frozen=True)
class TiledRows:
    """Rows whose tiles are decoded twice: once for the row maxima, once for the codes.

    Attributes:
        tile: Columns of a tile.
        tiles: Tiles of a row.
        num_warps: Warps of a program.
    """

    tile: int
    tiles: int
    num_warps: int

    @property
    def rows_per_pass(self) -> int:
        """Rows whose FP32 tile maxima fit the workspace; at least one row."""
        return max(1, MAX_WORKSPACE_BYTES // (4 * self.tiles))


def select_conversion_plan(target: AcceleratorTarget, features: int) -> RowChunks | TiledRows:
    """Return the schedule that converts rows of ``features`` values on a target.

    Rows that fit the registers are decoded once. HIP targets hold shorter rows.
    """
    chunks = plan_row_chunks(features)
    if target.backend == "hip" and features > MAX_HIP_ROW:
        chunks = None
    if chunks is not None:
        return chunks
    return TiledRows(TILE_COLUMNS, -(-features // TILE_COLUMNS), num_warps=4)
