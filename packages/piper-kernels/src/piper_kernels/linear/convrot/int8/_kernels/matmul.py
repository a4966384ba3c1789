"""The generic INT8 matrix product with scales and bias.

``[M, K] @ [N, K].T`` with INT32 accumulation; ``((acc * x_scale) * w_scale) + bias`` in FP32 is
rounded once. A second weight of equal shape may follow in the columns of the same launch.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def tile_position(tile, row_tiles, column_tiles, GROUP_M: tl.constexpr):
    """Return row and column index of a tile; ``GROUP_M`` row tiles share their columns."""
    group = row_tiles if GROUP_M == 0 else GROUP_M
    per_group = group * column_tiles
    first = (tile // per_group) * group
    size = tl.minimum(row_tiles - first, group)
    return first + (tile % per_group) % size, (tile % per_group) // size


@triton.jit
def load_bias(
    bias,
    second_bias,
    columns,
    mask,
    second,
    stride,
    second_stride,
    HAS_BIAS: tl.constexpr,
    HAS_SECOND_BIAS: tl.constexpr,
):
    """Return the FP32 bias of columns of the first projection, or of the second one."""
    values = tl.zeros(columns.shape, tl.float32)
    if HAS_BIAS:
        inside = mask & (second == 0)
        values += tl.load(bias + columns * stride, mask=inside, other=0.0).to(tl.float32)
    if HAS_SECOND_BIAS:
        inside = mask & (second != 0)
        other = tl.load(second_bias + columns * second_stride, mask=inside, other=0.0)
        values += other.to(tl.float32)
    return values


@triton.jit
def store_scaled(
    accumulator,
    x_scale,
    w_scale,
    second_w_scale,
    bias,
    second_bias,
    out,
    rows,
    columns,
    second,
    total_rows,
    total_columns,
    out_row_stride,
    bias_stride,
    second_bias_stride,
    PAIRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SECOND_BIAS: tl.constexpr,
):
    """Scale, bias, round and store a tile.

    Args:
        accumulator: int32 ``[ROWS, COLUMNS]``.
        x_scale: Pointer to FP32 ``[M]``.
        w_scale: Pointer to FP32 ``[N]``.
        second_w_scale: The same of the second projection.
        bias: Pointer to floating ``[N]``.
        second_bias: The same of the second projection.
        out: Pointer to ``[M, N]``, or ``[M, 2 * N]`` when ``PAIRED``.
        rows: int64 ``[ROWS]``.
        columns: ``[COLUMNS]`` within a projection.
        second: Whether the tile belongs to the second projection, 0 or 1.
        total_rows: ``M``.
        total_columns: ``N``.
        out_row_stride: int64 elements between rows of ``out``.
        bias_stride: Elements between biases.
        second_bias_stride: The same of the second projection.
        PAIRED: Whether there are two projections.
        HAS_BIAS: Whether the first has a bias.
        HAS_SECOND_BIAS: Whether the second has one.
    """
    row_mask = rows < total_rows
    column_mask = columns < total_columns
    x_scales = tl.load(x_scale + rows, mask=row_mask, other=0.0)
    w_pointer = tl.where(second != 0, second_w_scale, w_scale) if PAIRED else w_scale
    w_scales = tl.load(w_pointer + columns, mask=column_mask, other=0.0)
    values = (accumulator.to(tl.float32) * x_scales[:, None]) * w_scales[None, :]
    if HAS_BIAS or HAS_SECOND_BIAS:
        biases = load_bias(
            bias, second_bias, columns, column_mask, second, bias_stride, second_bias_stride,
            HAS_BIAS, HAS_SECOND_BIAS,
        )  # fmt: skip
        values += biases[None, :]
    target = out + rows[:, None] * out_row_stride + (columns + second * total_columns)[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    tl.store(target, values.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["total_rows"])
def matmul_kernel(
    x,
    w,
    second_w,
    x_scale,
    w_scale,
    second_w_scale,
    bias,
    second_bias,
    out,
    total_rows,
    total_columns,
    depth,
    x_row_stride,
    out_row_stride,
    bias_stride,
    second_bias_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PAIRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SECOND_BIAS: tl.constexpr,
):
    """Compute one tile, or with ``SPLIT_K > 1`` the int32 sum of one part of ``K``.

    ``x`` is int8 ``[M, K]`` with rows ``x_row_stride`` apart, ``w`` and ``second_w`` are
    contiguous int8 ``[N, K]``. Parts are stored to int32 ``out [SPLIT_K, M, columns]``. See
    ``store_scaled`` for the rest.
    """
    row_tiles = tl.cdiv(total_rows, BLOCK_M)
    column_tiles = tl.cdiv(total_columns, BLOCK_N)
    all_column_tiles = column_tiles * 2 if PAIRED else column_tiles
    tiles = row_tiles * all_column_tiles
    tile = tl.program_id(0) % tiles
    part = tl.program_id(0) // tiles
    row_tile, column_tile = tile_position(tile, row_tiles, all_column_tiles, GROUP_M)
    second = 0
    weight = w
    if PAIRED:
        second = (column_tile >= column_tiles).to(tl.int32)
        column_tile -= second * column_tiles
        weight = tl.where(second != 0, second_w, w)
    rows = row_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    # Rows and columns past the end repeat others; they are not stored.
    x_tile = x + (rows % total_rows)[:, None] * x_row_stride + step[None, :]
    w_tile = weight + (columns % total_columns).to(tl.int64)[None, :] * depth + step[:, None]
    steps = tl.cdiv(depth, BLOCK_K)
    part_steps = tl.cdiv(steps, SPLIT_K)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for index in range(part * part_steps, tl.minimum((part + 1) * part_steps, steps)):
        first = index * BLOCK_K
        if EVEN_K:
            left = tl.load(x_tile + first)
            right = tl.load(w_tile + first)
        else:
            inside = first + step < depth
            left = tl.load(x_tile + first, mask=inside[None, :], other=0)
            right = tl.load(w_tile + first, mask=inside[:, None], other=0)
        accumulator = tl.dot(left, right, accumulator, out_dtype=tl.int32)
    if SPLIT_K > 1:
        all_columns = total_columns * 2 if PAIRED else total_columns
        target = out + (part.to(tl.int64) * total_rows + rows)[:, None] * all_columns
        target += (columns + second * total_columns)[None, :]
        mask = (rows < total_rows)[:, None] & (columns < total_columns)[None, :]
        tl.store(target, accumulator, mask=mask)
    else:
        store_scaled(
            accumulator, x_scale, w_scale, second_w_scale, bias, second_bias, out, rows, columns,
            second, total_rows, total_columns, out_row_stride, bias_stride, second_bias_stride,
            PAIRED, HAS_BIAS, HAS_SECOND_BIAS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["total_rows"])
def sum_parts_kernel(
    parts,
    x_scale,
    w_scale,
    second_w_scale,
    bias,
    second_bias,
    out,
    total_rows,
    total_columns,
    out_row_stride,
    bias_stride,
    second_bias_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PAIRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SECOND_BIAS: tl.constexpr,
):
    """Sum the int32 ``parts [SPLIT_K, M, columns]`` of a split product and finish them."""
    column_tiles = tl.cdiv(total_columns, BLOCK_N)
    all_column_tiles = column_tiles * 2 if PAIRED else column_tiles
    all_columns = total_columns * 2 if PAIRED else total_columns
    column_tile = tl.program_id(0) % all_column_tiles
    second = 0
    if PAIRED:
        second = (column_tile >= column_tiles).to(tl.int32)
        column_tile -= second * column_tiles
    rows = (tl.program_id(0) // all_column_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < total_rows)[:, None] & (columns < total_columns)[None, :]
    source = parts + rows[:, None] * all_columns + (columns + second * total_columns)[None, :]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for part in tl.static_range(SPLIT_K):
        offset = part * total_rows.to(tl.int64) * all_columns
        accumulator += tl.load(source + offset, mask=mask, other=0)
    store_scaled(
        accumulator, x_scale, w_scale, second_w_scale, bias, second_bias, out, rows, columns,
        second, total_rows, total_columns, out_row_stride, bias_stride, second_bias_stride,
        PAIRED, HAS_BIAS, HAS_SECOND_BIAS,
    )  # fmt: skip
