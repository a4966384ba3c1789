"""Launches the product with a gated activation for Hopper; see `gated_product_kernel`.

Importing needs a Triton with Gluon's Hopper API.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false

import torch
import triton
from torch import Tensor

from phyai.triton import hopper_operands as operands
from phyai.triton.gated_product_kernel import GELU_TANH, SILU, gated_product_kernel
from phyai.triton.rows import flat_rows

BLOCK_H = 128
STAGES = 4
KINDS = {"gelu_tanh": GELU_TANH.value, "silu": SILU.value}


def gated_product(x: Tensor, weight: Tensor, kind: str) -> Tensor:
    """Returns ``act(x Wgᵀ) * (x Wuᵀ)`` [..., H] in bf16, summed and activated in fp32.

    The first of ``2 H`` rows of the weight are the gate's. The host waits for nothing, so that a
    CUDA graph may hold the launch; it keeps the addresses of ``x`` and ``weight``.

    Args:
        x: bf16 [..., K] on a Hopper GPU, K a multiple of 64.
        weight: bf16 [2 H, K], contiguous, H a multiple of 128.
        kind: ``gelu_tanh`` or ``silu``.

    Raises:
        ValueError: for other dtypes, sizes, activations, or a weight that TMA cannot read.
    """
    if kind not in KINDS:
        raise ValueError(f"activation is {kind!r}; allowed: {', '.join(KINDS)}")
    operands.check_operands(x, weight)
    if weight.shape[0] % (2 * BLOCK_H) or weight.shape[1] % operands.BLOCK_K:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; its rows must be a multiple of "
            f"{2 * BLOCK_H}, its columns of {operands.BLOCK_K}"
        )
    rows = operands.readable(flat_rows(x))
    hidden = weight.shape[0] // 2
    out = torch.empty((*x.shape[:-1], hidden), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    row_tiles = triton.cdiv(rows.shape[0], operands.BLOCK_M)
    units = row_tiles * (hidden // BLOCK_H)
    with torch.cuda.device(x.device):
        gated_product_kernel[(min(units, operands.processors(x.device)),)](
            operands.descriptor(rows, operands.BLOCK_M),
            operands.descriptor(weight, BLOCK_H),
            out,
            rows.shape[0],
            hidden,
            rows.shape[1],
            operands.group_size(row_tiles),
            STAGES=STAGES,
            KIND=KINDS[kind],
            STORE=operands.store_layout(BLOCK_H),
            COPY_REGISTERS=operands.COPY_REGISTERS,
            num_warps=operands.NUM_WARPS,
        )
    return out
