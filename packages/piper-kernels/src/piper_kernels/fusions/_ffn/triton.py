"""The kernel of gated updates. Importing needs Triton."""

# ruff: noqa: ANN001, ANN202  # the types of kernels are their docstrings
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl
from torch import Tensor

from piper_kernels._triton.runtime import launch_guard

_BLOCK = 1024


@triton.jit
def gated_updates_kernel(
    base_ptr,
    update_ptr,
    ffn_ptr,
    update_gate_ptr,
    ffn_gate_ptr,
    index_ptr,
    width,
    ffn_stride,
    update_gate_stride,
    ffn_gate_stride,
    gates,
    PYTHON_INDEXING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update ``BLOCK`` columns of one row; the gates have ``gates`` rows."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    index = tl.load(index_ptr + row).to(tl.int64)
    if PYTHON_INDEXING:
        index = tl.where(index < 0, index + gates, index)
    here = row * width + columns
    total = tl.load(base_ptr + here, mask=inside).to(tl.float32)
    update = tl.load(update_ptr + here, mask=inside).to(tl.float32)
    ffn = tl.load(ffn_ptr + row * ffn_stride + columns, mask=inside).to(tl.float32)
    gate = tl.load(update_gate_ptr + index * update_gate_stride + columns, mask=inside)
    total += gate.to(tl.float32) * update
    gate = tl.load(ffn_gate_ptr + index * ffn_gate_stride + columns, mask=inside)
    total += gate.to(tl.float32) * ffn
    tl.store(update_ptr + here, total.to(update_ptr.dtype.element_ty), mask=inside)


def apply_gated_updates(
    base: Tensor,
    update: Tensor,
    ffn: Tensor,
    update_gate: Tensor,
    ffn_gate: Tensor,
    gate_indices: Tensor,
    python_indexing: bool,
) -> None:
    """Overwrite ``update [rows, N]``; see ``GatedUpdates`` for the maths and the operands."""
    rows, width = base.shape
    if rows == 0 or width == 0:
        return
    with launch_guard(base.device):
        gated_updates_kernel[(rows, triton.cdiv(width, _BLOCK))](
            base,
            update,
            ffn,
            update_gate,
            ffn_gate,
            gate_indices,
            width,
            ffn.stride(0),
            update_gate.stride(0),
            ffn_gate.stride(0),
            update_gate.shape[0],
            PYTHON_INDEXING=python_indexing,
            BLOCK=_BLOCK,
            num_warps=4,
        )
