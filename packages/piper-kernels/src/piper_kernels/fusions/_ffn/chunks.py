"""How many rows of a feed-forward network are computed at a time.

Workspaces hold the rows of one chunk, so their size does not depend on the length of the
input. NVFP4 SwiGLU chunks have a fixed number of rows; other chunks fill a fixed number of bytes.
"""

INT8_CHUNK_ROWS = 2048
NVFP4_CHUNK_ROWS = 1536
ROW_TILE = 128
_INT8_BYTES = 128 << 20
_NVFP4_GELU_BYTES = 1 << 29
_SCALE_BYTES = 4


def require_chunk_rows(chunk_rows: int, multiple: int = 1) -> None:
    """Check a number of rows.

    Raises:
        TypeError: It is no integer.
        ValueError: It is no positive multiple.
    """
    if isinstance(chunk_rows, bool) or not isinstance(chunk_rows, int):
        raise TypeError(f"chunk_rows must be an integer, got {type(chunk_rows).__name__}")
    if chunk_rows <= 0 or chunk_rows % multiple:
        unit = "a positive integer" if multiple == 1 else f"a positive multiple of {multiple}"
        raise ValueError(f"chunk_rows must be {unit}, got {chunk_rows}")


def balanced_rows(rows: int, chunk_rows: int) -> int:
    """Return the rows of equal chunks, as many as chunks of at most ``chunk_rows`` take.

    A last chunk of few rows would cost as much time as one of many.
    """
    count = max(-(-rows // chunk_rows), 1)
    equal = max(-(-rows // count), 1)
    return min(-(-equal // ROW_TILE) * ROW_TILE, chunk_rows)


def int8_chunk_rows(
    sources: int,
    in_features: object,
    intermediate: object,
    out_features: object,
    element_size: int,
    *,
    gated_updates: bool = False,
) -> int:
    """Return the rows whose INT8 workspaces fit in 128 MiB, at least 128.

    Widths that are not known when a graph is compiled give 2048.

    Args:
        sources: Projections of the input, 2 for SwiGLU and 1 for GELU.
        in_features: Width of the input.
        intermediate: Outputs of a source.
        out_features: Width of the result.
        element_size: Bytes of an element of the input.
        gated_updates: Whether the result of a chunk needs a workspace.
    """
    if not (
        isinstance(in_features, int)
        and isinstance(intermediate, int)
        and isinstance(out_features, int)
    ):
        return INT8_CHUNK_ROWS
    width = sources * intermediate
    row = width * element_size + max(in_features, intermediate) + _SCALE_BYTES
    if gated_updates and out_features > width:
        row += out_features * element_size
    return _fitting(_INT8_BYTES, row)


def nvfp4_gelu_chunk_rows(
    in_features: object,
    intermediate: object,
    out_features: object,
    element_size: int,
    *,
    gated_updates: bool = False,
) -> int:
    """Return the rows whose NVFP4 workspaces fit in 512 MiB, at least 128.

    Widths that are not known when a graph is compiled give 1536.
    """
    if not (
        isinstance(in_features, int)
        and isinstance(intermediate, int)
        and isinstance(out_features, int)
    ):
        return NVFP4_CHUNK_ROWS
    row = _nvfp4_bytes(in_features) + intermediate * element_size + _nvfp4_bytes(intermediate)
    if gated_updates and out_features > intermediate:
        row += out_features * element_size
    return _fitting(_NVFP4_GELU_BYTES, row)


def _nvfp4_bytes(features: int) -> int:
    """Return the bytes of a prepared row: codes, and its part of the swizzled scales."""
    return features // 2 + 4 * -(-features // 64)


def _fitting(limit: int, row_bytes: int) -> int:
    return max(limit // row_bytes // ROW_TILE * ROW_TILE, ROW_TILE)
