"""The signed Hadamard rotation in Triton kernels: on matrix units for tiles of rows."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from piper_kernels.attention._signed_hadamard import SIGN_WORDS

_WORD_0: tl.constexpr = tl.constexpr(SIGN_WORDS[0])
_WORD_1: tl.constexpr = tl.constexpr(SIGN_WORDS[1])
_WORD_2: tl.constexpr = tl.constexpr(SIGN_WORDS[2])
_WORD_3: tl.constexpr = tl.constexpr(SIGN_WORDS[3])
# Bit i is the parity of the three bits of i.
_PARITIES: tl.constexpr = tl.constexpr(0x96)


@triton.jit
def _negated(features):
    """Return 1 where the sign of a feature below 128 is minus one, else 0."""
    lower = tl.where(features < 32, _WORD_0, _WORD_1)
    upper = tl.where(features < 96, _WORD_2, _WORD_3)
    word = tl.where(features < 64, lower, upper).to(tl.uint32)
    return 1 - ((word >> (features & 31).to(tl.uint32)) & 1).to(tl.int32)


@triton.jit
def signed_hadamard(FIRST: tl.constexpr, DTYPE: tl.constexpr):
    """Return ``diag(signs[FIRST : FIRST + 64]) @ H_64``, ``[64, 64]`` of plus and minus one."""
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    common = row & column
    common = (common ^ (common >> 3)) & 7
    odd = ((_PARITIES >> common) & 1) ^ _negated(FIRST + row)
    return (1.0 - 2.0 * odd.to(tl.float32)).to(DTYPE)


@triton.jit
def _exchange(values):
    """Exchange the two values of axis 1, exactly."""
    bits = values.to(tl.int32, bitcast=True)
    return (tl.sum(bits, axis=1, keep_dims=True) - bits).to(tl.float32, bitcast=True)


@triton.jit
def rotate_row(values, D: tl.constexpr):
    """Return ``(values * signs) @ H_D`` of FP32 ``[D]``, without the factor ``1 / sqrt(D)``."""
    values = values * (1.0 - 2.0 * _negated(tl.arange(0, D)).to(tl.float32))
    for stage in tl.static_range(7):
        if (1 << stage) < D:
            pairs = tl.reshape(values, (D >> (stage + 1), 2, 1 << stage))
            sign = 1.0 - 2.0 * tl.arange(0, 2).to(tl.float32)[None, :, None]
            values = tl.reshape(_exchange(pairs) + pairs * sign, (D,))
    return values
