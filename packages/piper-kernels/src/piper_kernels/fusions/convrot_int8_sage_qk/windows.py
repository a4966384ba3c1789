"""Windows of rows whose FP32 projection is in memory at one time."""

from collections.abc import Iterator

from piper_kernels._triton.targets import AcceleratorTarget

TILE = 64
_HOPPER = (9, 0)
# On Hopper launches cost more than memory: a few large windows. Elsewhere a window has to stay in
# the cache, because memory is slow beside products.
_HOPPER_BYTES = 128 << 20
_CACHED_BYTES = 24 << 20
_FLOAT_BYTES = 4


def window_bytes(target: AcceleratorTarget | None) -> int:
    """Return the bytes that a window may fill on a target."""
    large = target is not None and target.backend == "cuda" and target.capability == _HOPPER
    return _HOPPER_BYTES if large else _CACHED_BYTES


def windows(batch: int, rows: int, outputs: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Return windows of whole sequences, or of equal parts of one in multiples of 64 rows.

    Args:
        batch: Batches.
        rows: Rows of a sequence.
        outputs: Columns of the projection.
        limit: Bytes that the FP32 columns of a window may fill; 64 rows always fit.

    Yields:
        Ranges of batches and of rows.
    """
    most = max(limit // (outputs * _FLOAT_BYTES), TILE)
    if most >= rows:
        step = most // rows
        for first in range(0, batch, step):
            yield slice(first, min(first + step, batch)), slice(0, rows)
        return
    parts = -(-rows // (most // TILE * TILE))
    step = -(-rows // (parts * TILE)) * TILE
    for index in range(batch):
        for first in range(0, rows, step):
            yield slice(index, index + 1), slice(first, min(first + step, rows))
