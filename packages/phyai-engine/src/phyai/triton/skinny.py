"""Products of few rows with wide weights, fused with what stands around them in a decoder layer.

With 50 rows a product reads its weight once from memory and does little else, so launches and
waiting dominate. These kernels therefore join a whole sublayer boundary into one launch. The
adaptive norm ``y = x / rms(x) * (1 + scale) + shift`` is split between producer and consumer::

    y Wᵀ = (x * (1 + scale)) Wᵀ / rms(x) + shift Wᵀ

The producer of ``x`` stores ``x * (1 + scale)`` and sums of ``x²`` for its columns; the consumer
multiplies by the weight, divides rows by their rms and adds ``shift Wᵀ``, a constant of the
checkpoint for a given time. Products are summed in fp32.
"""

# ruff: noqa: ANN001, ANN202  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

PLAIN, GEGLU, ROPE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _weight_rows(tile, half, FORM: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the weight rows of a tile: pairs of rows ``half`` apart lie side by side."""
    column = tl.arange(0, BLOCK_N)
    if FORM == PLAIN:
        rows = tile * BLOCK_N + column
    elif FORM == GEGLU:
        rows = tile * (BLOCK_N // 2) + column // 2 + (column % 2) * half
    else:
        tiles = 2 * half // BLOCK_N
        first = (tile // tiles) * 2 * half + (tile % tiles) * (BLOCK_N // 2)
        rows = first + column // 2 + (column % 2) * half
    return rows


@triton.jit
def _product(
    x, weight, row, rows, weight_row, first, last, K, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Returns the fp32 sums [BLOCK_M, BLOCK_N] over columns ``first`` to ``last``."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    columns = tl.arange(0, BLOCK_K)
    left = x + row[:, None].to(tl.int64) * x_stride + columns[None, :]
    right = weight + weight_row[None, :].to(tl.int64) * K + columns[:, None]
    for start in tl.range(first, last, BLOCK_K):
        values = tl.load(left + start, mask=rows[:, None], other=0.0)
        factors = tl.load(right + start)
        if WIDE:  # the interpreter's products of bf16 are wrong
            total = tl.dot(
                values.to(tl.float32), factors.to(tl.float32), total, input_precision="ieee"
            )
        else:
            total = tl.dot(values, factors, total)
    return total


@triton.jit(do_not_specialize=["eps"])
def _consume_kernel(
    x, squares, weight, constant, out, keys, values, rotation,
    M, K, half, tiles, heads, first_slot, x_stride, out_stride, eps,
    FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TILES: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Norm, product and GeGLU, or norm, product, rotation and storing of keys and values."""
    tile = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = row < M
    weight_row = _weight_rows(tile, half, FORM, BLOCK_N)
    added = tl.load(constant + weight_row)
    pair = tl.arange(0, BLOCK_N // 2)
    # What the end needs is asked for before the loop and first touched after it, so that its
    # latency is hidden.
    part = tl.arange(0, TILES)
    inside = (part < tiles)[:, None] & rows[None, :]
    parts = tl.load(squares + part[:, None] * M + row[None, :], mask=inside, other=0.0)
    if FORM == ROPE:
        place = (tile % (2 * half // BLOCK_N)) * (BLOCK_N // 2) + pair
        table = rotation + row[:, None] * (2 * half) + place[None, :]
        cos = tl.load(table, mask=rows[:, None], other=0.0)
        sin = tl.load(table + half, mask=rows[:, None], other=0.0)
    total = _product(
        x, weight, row, rows, weight_row, 0, K, K, x_stride, BLOCK_M, BLOCK_N, BLOCK_K, WIDE
    )
    inverse = tl.math.rsqrt(tl.sum(parts, axis=0) / K + eps)
    total = total * inverse[:, None] + added[None, :]
    left, right = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N // 2, 2)))
    kind = out.dtype.element_ty
    if FORM == GEGLU:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        inner = left * (1.0 + 0.044715 * left * left)
        result = left * tl.sigmoid(1.5957691216057308 * inner) * right
        column = tile * (BLOCK_N // 2) + pair
        target = out + row[:, None].to(tl.int64) * out_stride + column[None, :]
        tl.store(target, result.to(kind), mask=rows[:, None])
    else:
        head = tile // (2 * half // BLOCK_N)
        if head <= heads:  # a query head or the key head
            left, right = left * cos - right * sin, right * cos + left * sin
        if head < heads:
            target = out + row[:, None].to(tl.int64) * out_stride + head * 2 * half
        elif head == heads:
            target = keys + (row + first_slot)[:, None].to(tl.int64) * (2 * half)
        else:
            target = values + (row + first_slot)[:, None].to(tl.int64) * (2 * half)
        target += place[None, :]
        tl.store(target, left.to(kind), mask=rows[:, None])
        tl.store(target + half, right.to(kind), mask=rows[:, None])


@triton.jit
def _produce_kernel(
    x, weight, residual, gate, scale, out, scaled, squares, partial, counters,
    M, N, K, x_stride,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Product with a gated residual, split over K; the last of a tile's programs adds the parts."""
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = row < M
    weight_row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = K // SPLITS
    first = tl.multiple_of(split * depth, BLOCK_K)
    gates = tl.load(gate + weight_row)
    factors = tl.load(scale + weight_row)
    place = row[:, None].to(tl.int64) * N + weight_row[None, :]
    old = tl.load(residual + place, mask=rows[:, None], other=0.0)
    total = _product(
        x, weight, row, rows, weight_row, first, first + depth, K, x_stride,
        BLOCK_M, BLOCK_N, BLOCK_K, WIDE,
    )  # fmt: skip
    last = True
    if SPLITS > 1:
        tl.store(partial + split.to(tl.int64) * M * N + place, total, mask=rows[:, None])
        counter = counters + tl.program_id(2) * tl.num_programs(0) + tile
        tl.debug_barrier()
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        last = arrived == SPLITS - 1
    if last:
        if SPLITS > 1:
            tl.store(counters + tl.program_id(2) * tl.num_programs(0) + tile, 0)
            # In a fixed order, so that the sum does not depend on who is last.
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for part in tl.static_range(SPLITS):
                total += tl.load(
                    partial + part * M * N + place, mask=rows[:, None], other=0.0,
                    cache_modifier=".cg",
                )  # fmt: skip
        kind = out.dtype.element_ty
        new = (old.to(tl.float32) + gates[None, :] * total).to(kind)
        tl.store(out + place, new, mask=rows[:, None])
        wide = new.to(tl.float32)
        tl.store(scaled + place, (wide * (1.0 + factors[None, :])).to(kind), mask=rows[:, None])
        tl.store(squares + tile * M + row, tl.sum(wide * wide, axis=1), mask=rows)


@triton.jit
def _enter_kernel(x, scale, scaled, squares, width, BLOCK: tl.constexpr) -> None:
    """Scales one row for its norm and sums its squares."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    values = tl.load(x + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    factors = tl.load(scale + columns, mask=mask, other=0.0)
    result = (values * (1.0 + factors)).to(scaled.dtype.element_ty)
    tl.store(scaled + row * width + columns, result, mask=mask)
    tl.store(squares + row, tl.sum(values * values, axis=0))
