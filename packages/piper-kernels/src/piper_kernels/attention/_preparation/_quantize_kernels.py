"""One launch that rotates and quantizes queries and keys and quantizes and transposes values."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from piper_kernels.attention._preparation._code_kernels import TILE
from piper_kernels.attention._preparation._row_kernels import encode_rows, scales_per_tile
from piper_kernels.attention._preparation._value_kernels import PER_TILE, encode_values

# Numbers that differ between calls; kernels are not compiled again for them.
_SIZES = [
    "query_rows",
    "key_rows",
    "query_heads",
    "key_heads",
    "query_programs",
    "key_programs",
    "query_chunks",
    "key_chunks",
    "chunk_tiles",
]


@triton.jit(do_not_specialize=_SIZES)
def quantize_kernel(
    query,
    key,
    value,
    lengths,
    query_codes,
    query_scale,
    key_codes,
    key_scale,
    rotated_mean,
    value_words,
    value_multiplier,
    value_logs,
    value_sum,
    value_numbers,
    query_rows,
    key_rows,
    query_heads,
    key_heads,
    query_programs,
    key_programs,
    query_chunks,
    key_chunks,
    chunk_tiles,
    query_factor,
    query_batch_stride,
    query_head_stride,
    query_row_stride,
    key_batch_stride,
    key_head_stride,
    key_row_stride,
    value_batch_stride,
    value_head_stride,
    value_row_stride,
    D: tl.constexpr,
    QUERY_GROUPS: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
    VALUES: tl.constexpr,
    PERMUTED: tl.constexpr,
    SUMS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_QUERIES: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Prepare a chunk of the tiles of one head of values, keys or queries.

    Programs are values, then keys, then queries. Each third may be absent; its pointers are not
    read then. Keys and values come from the last head to the first: the pass over them before
    this one leaves the last in the cache.

    Args:
        query: Floating ``[B, query_heads, query_rows, D]`` with contiguous features.
        key: Floating ``[B, key_heads, key_rows, D]``.
        value: Like ``key``.
        lengths: int32 ``[tiles]``, rows that exist at the front of tiles; when ``MASKED``.
        query_codes: int8 ``[B, query_heads, 64 * tiles, D]``.
        query_scale: FP32 ``[B, query_heads, ...]``, one per group, or per row with several groups.
        key_codes: int8 ``[B, key_heads, 64 * tiles, D]``.
        key_scale: Like ``query_scale``.
        rotated_mean: FP32 ``[B, key_heads, D]``, unscaled.
        value_words: int32 ``[B, key_heads, D, 16 * tiles]``.
        value_multiplier: FP32 ``[B, key_heads, 64 * tiles]`` or, per tile, ``[..., tiles]``.
        value_logs: FP32 ``[B, key_heads, tiles]``, with ``SUMS``.
        value_sum: int32 ``[B, key_heads, ceil(tiles / 2), D]``, with ``SUMS``.
        value_numbers: FP32 ``[B, key_heads, D]``: means or, for E4M3, scales.
        query_rows: Rows of queries.
        key_rows: Rows of keys and values.
        query_heads: Heads of queries.
        key_heads: Heads of keys and values.
        query_programs: Programs for queries.
        key_programs: Programs for keys. Values have the rest of the grid.
        query_chunks: Programs for one query head.
        key_chunks: Programs for one head of keys or values.
        chunk_tiles: Tiles of a program, an even number.
        query_factor: Factor of the stored query scale.
        query_batch_stride: Elements between batches of queries.
        query_head_stride: Elements between heads of queries.
        query_row_stride: Elements between rows of queries.
        key_batch_stride: Elements between batches of keys.
        key_head_stride: Elements between heads of keys.
        key_row_stride: Elements between rows of keys.
        value_batch_stride: Elements between batches of values.
        value_head_stride: Elements between heads of values.
        value_row_stride: Elements between rows of values.
        D: 64 or 128.
        QUERY_GROUPS: ``(repeats, groups, width)``; see ``_quantization.RowGroups``.
        KEY_GROUPS: The same of keys.
        VALUES: ``PER_KEY``, ``CENTERED``, ``PER_TILE`` or ``E4M3``.
        PERMUTED: Whether slots of 32 keys are in the order of 8-bit accumulator fragments.
        SUMS: Whether sums of codes and logarithms of scales are stored.
        MASKED: Whether tiles have lengths.
        WIDE: Whether products are FP32 products, as in the interpreter.
        HAS_QUERIES: Whether there are programs for queries.
        HAS_KEYS: Whether there are programs for keys.
        HAS_VALUES: Whether there are programs for values.
        STAGES: Tiles in flight.
    """
    program = tl.program_id(0)
    value_programs = tl.num_programs(0) - query_programs - key_programs
    key_tiles = (key_rows + TILE - 1) // TILE
    if program < value_programs + key_programs:
        is_value = program < value_programs
        index = tl.where(is_value, value_programs, value_programs + key_programs) - 1 - program
        lead = index // key_chunks
        first_tile = index % key_chunks * chunk_tiles
        last_tile = tl.minimum(first_tile + chunk_tiles, key_tiles)
        batch, head = (lead // key_heads).to(tl.int64), (lead % key_heads).to(tl.int64)
        lead = lead.to(tl.int64)
        at_tiles = lead * key_tiles
        if HAS_VALUES and is_value:
            SCALES: tl.constexpr = 1 if VALUES == PER_TILE else TILE
            encode_values(
                value + batch * value_batch_stride + head * value_head_stride,
                value_words + at_tiles * 16 * D,
                value_multiplier + at_tiles * SCALES,
                value_logs + at_tiles,
                value_sum + lead * ((key_tiles + 1) // 2) * D,
                value_numbers + lead * D,
                lengths,
                key_rows,
                value_row_stride,
                key_tiles,
                first_tile,
                last_tile,
                D,
                VALUES,
                PERMUTED,
                SUMS,
                MASKED,
            )
        if HAS_KEYS and not is_value:
            encode_rows(
                key + batch * key_batch_stride + head * key_head_stride,
                key_codes + at_tiles * TILE * D,
                key_scale + at_tiles * scales_per_tile(KEY_GROUPS),
                rotated_mean + lead * D,
                lengths,
                key_rows,
                key_row_stride,
                first_tile,
                last_tile,
                1.0,
                D,
                KEY_GROUPS,
                False,
                MASKED,
                WIDE,
                STAGES,
            )
    elif HAS_QUERIES:
        index = program - value_programs - key_programs
        query_tiles = (query_rows + TILE - 1) // TILE
        lead = index // query_chunks
        first_tile = index % query_chunks * chunk_tiles
        last_tile = tl.minimum(first_tile + chunk_tiles, query_tiles)
        batch, head = (lead // query_heads).to(tl.int64), (lead % query_heads).to(tl.int64)
        lead = lead.to(tl.int64)
        at_tiles = lead * query_tiles
        encode_rows(
            query + batch * query_batch_stride + head * query_head_stride,
            query_codes + at_tiles * TILE * D,
            query_scale + at_tiles * scales_per_tile(QUERY_GROUPS),
            rotated_mean,
            lengths,
            query_rows,
            query_row_stride,
            first_tile,
            last_tile,
            query_factor,
            D,
            QUERY_GROUPS,
            True,
            MASKED,
            WIDE,
            STAGES,
        )
