"""A kernel that only hands work to groups of warps, to know what a race detector says of that.

Importing needs a Triton with Gluon.
"""

# ruff: noqa: ANN001, ANN202  # device functions
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPS = 4


@gluon.jit
def store_first(out):
    """Store in the first place."""
    gl.store(out, 1.0)


@gluon.jit
def store_second(out):
    """Store in the second place."""
    gl.store(out + 1, 2.0)


@gluon.jit
def warp_groups_kernel(out):
    """Let two groups of warps store a number each; no shared memory is used here."""
    gl.warp_specialize([(store_first, (out,)), (store_second, (out,))], [4], [24])
