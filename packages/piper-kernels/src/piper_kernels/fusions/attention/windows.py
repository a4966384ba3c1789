"""Windows of rows that bound what exists between an attention and its output projection."""

SPARSE_WINDOW_ROWS = 8192
DENSE_WINDOW_ROWS = 8192
# What compiled ConvRot INT8 graphs ask for: on a GPU as fast as an H200, the launches of a window
# cost the host about as long as 8192 rows cost the device.
COMPILED_WINDOW_ROWS = 16_384
NVFP4_WINDOW_ROWS = 8192
NVFP4_DYNAMIC_CHUNK_ROWS = 32_768
NVFP4_PROJECTION_CHUNK_ROWS = 4096
# From so many windows on, gates are projected ahead of the attention.
GATE_STREAM_WINDOWS = 8


def balanced_windows(rows: int, most: int, multiple: int) -> list[slice]:
    """Return equal windows of at most ``most`` rows, as few as there can be.

    All but the last are multiples of ``multiple``, which divides ``most``.
    """
    count = max(-(-rows // most), 1)
    size = -(-rows // (count * multiple)) * multiple
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size or 1)]


def wave_windows(rows: int, most: int, multiple: int, wave_rows: int) -> list[slice]:
    """Return windows of whole waves of programs where those need fewer waves in all.

    Args:
        rows: Rows of all windows.
        most: Most rows of a window.
        multiple: What windows but the last are multiples of; divides ``most``.
        wave_rows: Rows that a device computes at one time; 0 where that is not known.
    """
    balanced = balanced_windows(rows, most, multiple)
    size = most // wave_rows * wave_rows // multiple * multiple if wave_rows else 0
    if not size or not rows:
        return balanced
    waves = [slice(first, min(first + size, rows)) for first in range(0, rows, size)]
    return min((balanced, waves), key=lambda windows: _wave_count(windows, wave_rows))


def _wave_count(windows: list[slice], wave_rows: int) -> int:
    return sum(-(-(window.stop - window.start) // wave_rows) for window in windows)
