"""A kernel that only hands sums to groups of warps, to know what a race detector says of that.

Importing needs a Triton with Gluon.
"""

# ruff: noqa: ANN001, ANN202  # device functions
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPS = 4
BLOCKS = 64
NUMBERS = 128


@gluon.jit
def store_sum(x, out, place):
    """Add 128 numbers: warps exchange their sums, with barriers of their group alone."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    numbers = gl.load(x + gl.arange(0, 128, layout=layout))
    gl.store(out + place, gl.sum(numbers, axis=0))


@gluon.jit
def store_first(x, out):
    """Store the sum in the first place."""
    store_sum(x, out, 0)


@gluon.jit
def store_second(x, out):
    """Store the sum in the second place."""
    store_sum(x, out, 1)


@gluon.jit
def store_third(x, out):
    """Store the first number in the third place, with one warp."""
    gl.store(out + 2, gl.load(x))


@gluon.jit
def warp_groups_kernel(x, out):
    """Let two groups of four warps and a single warp store a number each."""
    gl.warp_specialize(
        [(store_first, (x, out)), (store_second, (x, out)), (store_third, (x, out))],
        [4, 1],
        [24, 24],
    )
