"""Plain and gated activations, computed in FP32.

Each launcher has the contract of its reference row in ``phyai.kernels.activation``.
"""

# ruff: noqa: ANN001, ANN202  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.triton.rows import flat_rows

BLOCK = 1024

_GELU, _GELU_TANH, _SILU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
KINDS = {"gelu": 0, "gelu_tanh": 1, "silu": 2, "relu2": 3}


@triton.jit
def _activate(values, KIND: tl.constexpr):
    if KIND == _GELU:
        result = 0.5 * values * (1.0 + tl.math.erf(values * 0.7071067811865476))
    elif KIND == _GELU_TANH:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        inner = values * (1.0 + 0.044715 * values * values)
        result = values * tl.sigmoid(1.5957691216057308 * inner)
    elif KIND == _SILU:
        result = values * tl.sigmoid(values)
    else:
        positive = tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL)
        result = positive * positive
    return result


@triton.jit
def _activation_kernel(
    x, out, hidden, x_stride, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    blocks = tl.cdiv(hidden, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < hidden
    source = x + row * x_stride + columns
    result = _activate(tl.load(source, mask=mask, other=0.0).to(tl.float32), KIND)
    if GATED:
        result *= tl.load(source + hidden, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + columns, result.to(out.dtype.element_ty), mask=mask)


def activation(x: Tensor, kind: str, *, gated: bool) -> Tensor:
    """Returns ``act(x)``, or ``act(left) * right`` of ``x`` [..., left | right] when gated.

    Args:
        x: [..., H], or [..., 2 * H] when gated.
        kind: ``gelu`` (exact), ``gelu_tanh``, ``silu`` or ``relu2`` (the square of ReLU).
        gated: whether the right half multiplies the activated left half.
    """
    rows = flat_rows(x)
    hidden = x.shape[-1] // 2 if gated else x.shape[-1]
    out = torch.empty((*x.shape[:-1], hidden), dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(hidden))
        _activation_kernel[(rows.shape[0] * triton.cdiv(hidden, block),)](
            rows,
            out,
            hidden,
            rows.stride(0),
            KIND=KINDS[kind],
            GATED=gated,
            BLOCK=block,
        )
    return out
