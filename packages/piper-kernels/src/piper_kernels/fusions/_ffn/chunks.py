"""How many rows of a feed-forward network are computed at a time.

Workspaces hold the rows of one chunk, so their size does not depend on the length of the
input. SwiGLU chunks have a fixed number of rows; GELU chunks fill a fixed number of bytes.
"""

INT8_CHUNK_ROWS = 4096
NVFP4_CHUNK_ROWS = 1536
ROW_TILE = 128
_INT8_GELU_BYTES = 1 << 30
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


def int8_gelu_chunk_rows(
    in_features: object,
    intermediate: object,
    out_features: object,
    element_size: int,
    *,
    gated_updates: bool = False,
) -> int:
    """Return the rows whose INT8 workspaces fit in 1 GiB, at least 128.

    Widths that are not known when a graph is compiled give 4096.
    """
    if not (
        isinstance(in_features, int)
        and isinstance(intermediate, int)
        and isinstance(out_features, int)
    ):
        return INT8_CHUNK_ROWS
    row = intermediate * element_size + max(in_features, intermediate) + _SCALE_BYTES
    if gated_updates and out_features > intermediate:
        row += out_features * element_size
    return _fitting(_INT8_GELU_BYTES, row)


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
