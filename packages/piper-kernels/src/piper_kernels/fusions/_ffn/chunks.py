"""How many rows of a feed-forward network are computed at a time.

Workspaces hold the rows of one chunk. NVFP4 SwiGLU chunks have a fixed number of rows; other
chunks fill a fixed number of bytes, those of INT8 networks fewer where the input is short: the
workspace is small beside the input, and weights are read often enough to be worth their time.
"""

INT8_CHUNK_ROWS = 2048
NVFP4_CHUNK_ROWS = 1536
ROW_TILE = 128
_INT8_BYTES = 384 << 20
_SHORT_INT8_BYTES = 128 << 20
_LEAST_CHUNKS = 8
_NVFP4_GELU_BYTES = 1 << 29
_SCALE_BYTES = 4


def balanced_rows(rows: int, chunk_rows: int) -> int:
    """Return the rows of equal chunks, as many as chunks of at most ``chunk_rows`` take.

    A last chunk of few rows would cost as much time as one of many.
    """
    count = max(-(-rows // chunk_rows), 1)
    equal = max(-(-rows // count), 1)
    return min(-(-equal // ROW_TILE) * ROW_TILE, chunk_rows)


def int8_row_bytes(
    sources: int,
    in_features: int,
    intermediate: int,
    out_features: int,
    element_size: int,
    *,
    gated_updates: bool = False,
) -> int:
    """Return the bytes of the INT8 workspaces for a row; arguments are those of the rows."""
    width = sources * intermediate
    row = width * element_size + max(in_features, intermediate) + _SCALE_BYTES
    if gated_updates and out_features > width:
        row += out_features * element_size
    return row


def int8_chunk_rows(
    sources: int,
    in_features: object,
    intermediate: object,
    out_features: object,
    element_size: int,
    *,
    gated_updates: bool = False,
) -> int:
    """Return the most rows of a chunk: their INT8 workspaces fit in 384 MiB; at least 128.

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
    widths = (in_features, intermediate, out_features)
    row = int8_row_bytes(sources, *widths, element_size, gated_updates=gated_updates)
    return _fitting(_INT8_BYTES, row)


def int8_rows_of(rows: int, chunk_rows: int, row_bytes: int) -> int:
    """Return the rows of equal chunks of an input.

    A chunk is an eighth of the input at most, or what fits in 128 MiB where that is more.

    Args:
        rows: Rows of the input.
        chunk_rows: Most rows of a chunk.
        row_bytes: Bytes of the workspaces for a row.
    """
    share = rows // _LEAST_CHUNKS // ROW_TILE * ROW_TILE
    return balanced_rows(rows, min(chunk_rows, max(share, _fitting(_SHORT_INT8_BYTES, row_bytes))))


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
