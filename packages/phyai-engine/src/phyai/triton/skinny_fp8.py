"""The products of `phyai.triton.skinny` with FP8 weights, whose rows have one scale each.

Activations stay in half precision: a weight is read as codes, half as many bytes, converted in
registers and multiplied from there. The matrix unit takes only its left operand from registers, so
products are computed transposed, ``W xᵀ``, and everything behind them is ``[weight rows, rows]``.
"""

# ruff: noqa: ANN001, ANN202  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from phyai.triton.skinny import GEGLU


@triton.jit
def _weight_rows(tile, half, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the weight rows of a tile: those ``half`` apart are eight rows apart in a tile.

    Rows eight apart lie in one thread's registers, so that pairing them moves nothing.
    """
    column = tl.arange(0, BLOCK_N)
    if WHOLE:  # pairs over the whole weight
        first = tile * (BLOCK_N // 2)
    else:  # pairs within a head of 2 * half rows
        tiles = 2 * half // BLOCK_N
        first = (tile // tiles) * 2 * half + (tile % tiles) * (BLOCK_N // 2)
    return first + (column // 16) * 8 + column % 8 + ((column // 8) % 2) * half


@triton.jit
def _product(
    x, weight, row, rows, weight_row, first, last, K, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Returns the fp32 sums [BLOCK_N, BLOCK_M] of codes over columns ``first`` to ``last``."""
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    columns = tl.arange(0, BLOCK_K)
    left = weight + weight_row[:, None].to(tl.int64) * K + columns[None, :]
    right = x + row[None, :].to(tl.int64) * x_stride + columns[:, None]
    for start in tl.range(first, last, BLOCK_K):
        codes = tl.load(left + start)
        values = tl.load(right + start, mask=rows[None, :], other=0.0)
        if WIDE:  # the interpreter's products of bf16 are wrong
            total = tl.dot(
                codes.to(tl.float32), values.to(tl.float32), total, input_precision="ieee"
            )
        else:
            total = tl.dot(codes.to(values.dtype), values, total)
    return total


@triton.jit
def _pairs(total, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns the first and second rows of all pairs, each [BLOCK_N / 2, BLOCK_M]."""
    apart = tl.permute(tl.reshape(total, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
    left, right = tl.split(apart)
    return (
        tl.reshape(left, (BLOCK_N // 2, BLOCK_M)),
        tl.reshape(right, (BLOCK_N // 2, BLOCK_M)),
    )


@triton.jit(do_not_specialize=["eps"])
def _consume_fp8_kernel(
    x, squares, weight, weight_scale, constant, out, keys, values, rotation,
    M, K, half, tiles, heads, first_slot, x_stride, out_stride, eps,
    FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TILES: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Norm, product and GeGLU, or norm, product, rotation and storing of keys and values."""
    tile = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = row < M
    weight_row = _weight_rows(tile, half, FORM == GEGLU, BLOCK_N)
    factors = tl.load(weight_scale + weight_row)
    added = tl.load(constant + weight_row)
    pair = tl.arange(0, BLOCK_N // 2)
    # What the end needs is asked for before the loop and first touched after it, so that its
    # latency is hidden.
    part = tl.arange(0, TILES)
    inside = (part < tiles)[:, None] & rows[None, :]
    parts = tl.load(squares + part[:, None] * M + row[None, :], mask=inside, other=0.0)
    if FORM != GEGLU:
        place = (tile % (2 * half // BLOCK_N)) * (BLOCK_N // 2) + pair
        table = rotation + row[None, :] * (2 * half) + place[:, None]
        cos = tl.load(table, mask=rows[None, :], other=0.0)
        sin = tl.load(table + half, mask=rows[None, :], other=0.0)
    total = _product(
        x, weight, row, rows, weight_row, 0, K, K, x_stride, BLOCK_M, BLOCK_N, BLOCK_K, WIDE
    )
    inverse = tl.math.rsqrt(tl.sum(parts, axis=0) / K + eps)
    total = total * (factors[:, None] * inverse[None, :]) + added[:, None]
    left, right = _pairs(total, BLOCK_N, BLOCK_M)
    kind = out.dtype.element_ty
    if FORM == GEGLU:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        inner = left * (1.0 + 0.044715 * left * left)
        result = left * tl.sigmoid(1.5957691216057308 * inner) * right
        column = tile * (BLOCK_N // 2) + pair
        target = out + row[None, :].to(tl.int64) * out_stride + column[:, None]
        tl.store(target, result.to(kind), mask=rows[None, :])
    else:
        head = tile // (2 * half // BLOCK_N)
        if head <= heads:  # a query head or the key head
            left, right = left * cos - right * sin, right * cos + left * sin
        if head < heads:
            target = out + row[None, :].to(tl.int64) * out_stride + head * 2 * half
        elif head == heads:
            target = keys + (row + first_slot)[None, :].to(tl.int64) * (2 * half)
        else:
            target = values + (row + first_slot)[None, :].to(tl.int64) * (2 * half)
        target += place[:, None]
        tl.store(target, left.to(kind), mask=rows[None, :])
        tl.store(target + half, right.to(kind), mask=rows[None, :])


@triton.jit
def _produce_fp8_kernel(
    x, weight, weight_scale, residual, gate, scale, out, scaled, squares, partial, counters,
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
    gates = tl.load(gate + weight_row) * tl.load(weight_scale + weight_row)
    factors = tl.load(scale + weight_row)
    place = row[None, :].to(tl.int64) * N + weight_row[:, None]
    old = tl.load(residual + place, mask=rows[None, :], other=0.0)
    total = _product(
        x, weight, row, rows, weight_row, first, first + depth, K, x_stride,
        BLOCK_M, BLOCK_N, BLOCK_K, WIDE,
    )  # fmt: skip
    last = True
    if SPLITS > 1:
        tl.store(partial + split.to(tl.int64) * M * N + place, total, mask=rows[None, :])
        counter = counters + tl.program_id(2) * tl.num_programs(0) + tile
        tl.debug_barrier()
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        last = arrived == SPLITS - 1
    if last:
        if SPLITS > 1:
            tl.store(counters + tl.program_id(2) * tl.num_programs(0) + tile, 0)
            # In a fixed order, so that the sum does not depend on who is last.
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for part in tl.static_range(SPLITS):
                total += tl.load(
                    partial + part * M * N + place, mask=rows[None, :], other=0.0,
                    cache_modifier=".cg",
                )  # fmt: skip
        kind = out.dtype.element_ty
        new = (old.to(tl.float32) + gates[:, None] * total).to(kind)
        tl.store(out + place, new, mask=rows[None, :])
        wide = new.to(tl.float32)
        tl.store(scaled + place, (wide * (1.0 + factors[:, None])).to(kind), mask=rows[None, :])
        tl.store(squares + tile * M + row, tl.sum(wide * wide, axis=0), mask=rows)
