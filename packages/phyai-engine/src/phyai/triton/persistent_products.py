"""The products of the persistent decoder kernel with what stands around them.

They read what other programs stored before the last barrier past the first-level cache. The
adaptive norms are split between their producer and consumer as in `phyai.triton.skinny`. Importing
needs a Triton with Gluon's Hopper API.
"""

# ruff: noqa: ANN001, ANN201  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from phyai.triton.persistent_tiles import (
    BLOCK_K,
    BLOCK_M,
    ROWS_16,
    ROWS_32,
    barrier,
    halves,
    multiply,
    no_sums,
    store_rows,
    tile_rows,
)

_SQUARES = gl.constexpr(gl.BlockedLayout([1, 16], [16, 2], [4, 1], [1, 0]))


@gluon.jit
def load_squares(squares, rows, PARTS: gl.constexpr):
    """Ask for the sums of squares of each row's columns, fp32 [BLOCK_M, PARTS]."""
    row = gl.expand_dims(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, _SQUARES)), 1)
    part = gl.expand_dims(gl.arange(0, PARTS, layout=gl.SliceLayout(0, _SQUARES)), 0)
    place = squares + row * PARTS + part
    return gl.load(place, mask=row < rows, other=0.0, cache_modifier=".cg")


@gluon.jit
def normed(total, squares, width, eps, added):
    """Return sums divided by the rms of their rows, plus ``added`` for each column."""
    layout: gl.constexpr = total.type.layout
    inverse = gl.rsqrt(gl.sum(squares, axis=1) / width + eps)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, layout))
    return total * gl.expand_dims(inverse, 1) + gl.expand_dims(added, 0)


@gluon.jit
def project(
    tile, scaled, squares, constant, query, keys, values, rotation, weights, ready, empty,
    used, ring, rows, eps, WIDTH: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Norm, product and rotation; queries, keys and values are stored. Returns ``used``."""
    N: gl.constexpr = weights.shape[1]
    TILES: gl.constexpr = DIM // N
    layout: gl.constexpr = no_sums(N).type.layout
    paired: gl.constexpr = halves(no_sums(N))[0].type.layout
    head = tile // TILES
    place = (tile % TILES) * (N // 2)
    column = tile_rows(head * DIM + place, DIM // 2, N, gl.SliceLayout(0, layout))
    added = gl.load(constant + column)
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, paired))
    pair = gl.arange(0, N // 2, layout=gl.SliceLayout(0, paired))
    table = rotation + gl.expand_dims(row * DIM, 1) + gl.expand_dims(place + pair, 0)
    inside = gl.expand_dims(row < rows, 1)
    cos = gl.load(table, mask=inside, other=0.0)
    sin = gl.load(table + DIM // 2, mask=inside, other=0.0)
    loaded = load_squares(squares, rows, PARTS)
    total, used = multiply(
        scaled, WIDTH, rows, 0, weights, ready, empty, used, ring, WIDTH // BLOCK_K
    )
    left, right = halves(normed(total, loaded, WIDTH, eps, added))
    if head <= HEADS:  # a query head or the key head
        turned = right * cos + left * sin
        left = left * cos - right * sin
        right = turned
    if head < HEADS:
        store_rows(left, query + head * DIM + place, HEADS * DIM, rows, ROWS_16)
        store_rows(right, query + head * DIM + place + DIM // 2, HEADS * DIM, rows, ROWS_16)
    elif head == HEADS:
        store_rows(left, keys + place, DIM, rows, ROWS_16)
        store_rows(right, keys + place + DIM // 2, DIM, rows, ROWS_16)
    else:
        store_rows(left, values + place, DIM, rows, ROWS_16)
        store_rows(right, values + place + DIM // 2, DIM, rows, ROWS_16)
    return used


@gluon.jit
def activate(
    tile, scaled, squares, constant, hidden, weights, ready, empty, used, ring, rows, eps,
    WIDTH: gl.constexpr, MLP: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Norm, product and ``gelu_tanh(gate) * up``. Returns ``used``."""
    N: gl.constexpr = weights.shape[1]
    layout: gl.constexpr = no_sums(N).type.layout
    first = tile * (N // 2)
    added = gl.load(constant + tile_rows(first, MLP, N, gl.SliceLayout(0, layout)))
    loaded = load_squares(squares, rows, PARTS)
    total, used = multiply(
        scaled, WIDTH, rows, 0, weights, ready, empty, used, ring, WIDTH // BLOCK_K
    )
    gate, up = halves(normed(total, loaded, WIDTH, eps, added))
    # (1 + tanh(u)) / 2 is the sigmoid of 2 u; 2 sqrt(2 / pi) log2(e) is the factor.
    inner = gate * (1.0 + 0.044715 * gate * gate)
    result = gate / (1.0 + gl.exp2(-2.302208198144325 * inner)) * up
    store_rows(result, hidden + first, MLP, rows, ROWS_32)
    return used


@gluon.jit
def add_product(
    item, x, weights, ready, empty, used, ring, residual, gate, scale, scaled, squares, partial,
    counters, rows, WIDTH: gl.constexpr, DEPTH: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """A part of a product; the last of a tile's programs adds them, gated, to the residual.

    Returns ``used``.
    """
    N: gl.constexpr = weights.shape[1]
    TILES: gl.constexpr = WIDTH // N
    tile = item % TILES
    part = item // TILES
    first = tile * N
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROWS_32))
    column = first + gl.arange(0, N, layout=gl.SliceLayout(0, ROWS_32))
    place = gl.expand_dims(row * WIDTH, 1) + gl.expand_dims(column, 0)
    inside = gl.expand_dims(row < rows, 1)
    # What the end needs is asked for before the product, so that its latency is hidden.
    gates = gl.load(gate + column)
    factors = gl.load(scale + column)
    old = gl.load(residual + place, mask=inside, other=0.0, cache_modifier=".cg")
    PART: gl.constexpr = DEPTH // SPLITS
    total, used = multiply(
        x, DEPTH, rows, part * PART, weights, ready, empty, used, ring, PART // BLOCK_K
    )
    layout: gl.constexpr = total.type.layout
    own_row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    own_column = first + gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    own = gl.expand_dims((part * rows + own_row) * WIDTH, 1) + gl.expand_dims(own_column, 0)
    gl.store(partial + own, total, mask=gl.expand_dims(own_row < rows, 1))
    barrier()
    if gl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
        gl.store(counters + tile, 0)
        # In a fixed order, so that the sum does not depend on who is last.
        whole = gl.zeros((BLOCK_M, N), gl.float32, ROWS_32)
        for other in gl.static_range(SPLITS):
            source = partial + other * rows * WIDTH + place
            whole += gl.load(source, mask=inside, other=0.0, cache_modifier=".cg")
        kind = residual.dtype.element_ty
        new = (old.to(gl.float32) + gl.expand_dims(gates, 0) * whole).to(kind)
        gl.store(residual + place, new, mask=inside)
        wide = new.to(gl.float32)
        gl.store(scaled + place, (wide * (1.0 + gl.expand_dims(factors, 0))).to(kind), mask=inside)
        gl.store(squares + row * TILES + tile, gl.sum(wide * wide, axis=1), mask=row < rows)
    return used
