"""How 64 projected rows of one head become queries, keys or values, in Gluon.

Blocks are FP32 ``[64, D]`` in the registers that integer WGMMA leaves them in. Importing needs a
Triton with Gluon.
"""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportAssignmentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from piper_kernels.fusions.projected_qk._hopper_heads import over_rows, rotated, store_columns

ROWS = gl.constexpr(64)
# 1.5 * 2**23 leaves no fraction bits, so adding it rounds half to even.
_ROUND = gl.constexpr(12582912.0)


@gluon.jit
def _int8_scale(amax):
    """Return the scale of numbers with the largest magnitude ``amax``; never zero."""
    return amax / 127.0 + 1e-7


@gluon.jit
def _code_pairs(x):
    """Return the codes of numbers within 127.5, two side by side in int16 ``[64, D / 2]``."""
    bits = (x + _ROUND).to(gl.int32, bitcast=True)
    first, second = gl.split(gl.reshape(bits, [ROWS, x.shape[1] // 2, 2]))
    return ((first & 255) | (second << 8)).to(gl.int16)


@gluon.jit
def _store_rows(x, target, count, STORE: gl.constexpr):
    """Store ``[64, N]`` at a pointer to contiguous rows; those from ``count`` on are left out."""
    COLUMNS: gl.constexpr = x.shape[1]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, STORE))
    at = gl.expand_dims(row * COLUMNS, 1) + gl.expand_dims(column, 0)
    gl.store(target + at, gl.convert_layout(x, STORE), mask=gl.expand_dims(row < count, 1))


@gluon.jit
def store_queries(x, exists, words, scales, factor, STORE: gl.constexpr):
    """Rotate and quantize a block; 32 rows share a scale.

    Args:
        x: FP32 ``[64, D]``, normalized and turned, finite in all rows.
        exists: Which rows exist, ``[64]``; the others become zero.
        words: Pointer to int16 ``[64, D / 2]``, two codes each.
        scales: Pointer to FP32 ``[2]``.
        factor: Factor of the stored scales.
        STORE: Layout in which words are stored.
    """
    D: gl.constexpr = x.shape[1]
    NORM: gl.constexpr = 0.125 if D == 64 else 0.08838834764831845
    layout: gl.constexpr = x.type.layout
    x = rotated(x)
    amax = gl.where(exists, gl.max(gl.abs(x), axis=1), 0.0)
    grouped = gl.reshape(amax, [2, ROWS // 2])
    scale = _int8_scale(gl.max(grouped, axis=1) * NORM)
    group = gl.arange(0, 2, layout=scale.type.layout)
    gl.store(scales + group, scale * factor)
    inverse = gl.expand_dims(NORM / scale, 1) + gl.zeros_like(grouped)
    inverse = gl.convert_layout(gl.reshape(inverse, [ROWS]), gl.SliceLayout(1, layout))
    inverse = gl.where(exists, inverse, 0.0)
    _store_rows(_code_pairs(x * gl.expand_dims(inverse, 1)), words, ROWS, STORE)


@gluon.jit
def store_keys(x, exists, keys, sums, count, STORE: gl.constexpr):
    """Store a block in the dtype of keys, and the sums of its rows that exist.

    Args:
        x: FP32 ``[64, D]``, normalized and turned.
        exists: Which rows exist, ``[64, 1]``.
        keys: Pointer to floating ``[64, D]``.
        sums: Pointer to FP32 ``[D]``.
        count: Rows that are stored.
        STORE: Layout in which they are.
    """
    stored = x.to(keys.dtype.element_ty)
    store_columns(sums, over_rows(gl.where(exists, stored.to(gl.float32), 0.0), "sum"))
    _store_rows(stored, keys, count, STORE)


@gluon.jit
def store_values(
    x,
    exists,
    mean,
    codes,
    multiplier,
    stride,
    STORE: gl.constexpr,
):
    """Center, quantize and transpose a block; all of it shares a scale.

    Args:
        x: FP32 ``[64, D]``.
        exists: Which rows exist, ``[64, 1]``; the others become zero.
        mean: Pointer to FP32 ``[D]``.
        codes: Pointer to the first of 64 codes of the first feature.
        multiplier: Pointer to 255 times the scale.
        stride: Codes between features, a multiple of 64.
        STORE: Layout of ``[64, D / 2]`` in which rows of two features are stored.
    """
    D: gl.constexpr = x.shape[1]
    feature = gl.arange(0, D, layout=gl.SliceLayout(0, x.type.layout))
    x = gl.where(exists, x - gl.expand_dims(gl.load(mean + feature), 0), 0.0)
    scale = _int8_scale(gl.max(gl.max(gl.abs(x), axis=1), axis=0))
    gl.store(multiplier, scale * 255.0)
    pairs = gl.convert_layout(_code_pairs(x * (1.0 / scale)), STORE)
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE)), 1)
    pair = gl.expand_dims(gl.arange(0, D // 2, layout=gl.SliceLayout(0, STORE)), 0)
    target = codes + pair.to(gl.int64) * (2 * stride) + row
    gl.store(target, pairs.to(gl.int8))
    gl.store(target + stride, (pairs >> 8).to(gl.int8))


@gluon.jit
def store_block_mean(x, exists, count, target):
    """Store the mean of the rows that exist, of which there are ``count``, at a pointer."""
    total = over_rows(gl.where(exists, x, 0.0), "sum")
    store_columns(target, total / count.to(gl.float32))
