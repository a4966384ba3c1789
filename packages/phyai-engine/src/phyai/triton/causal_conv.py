"""Depthwise causal convolution over tokens with an optional SiLU."""

# ruff: noqa: ANN001  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.triton.rows import flat_rows

CHANNELS = 256
TOKENS = 16


@triton.jit
def _causal_conv_kernel(
    x,
    weight,
    out,
    tokens,
    channels,
    x_stride,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    blocks = tl.cdiv(channels, CHANNELS)
    token = (tl.program_id(0) // blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = (tl.program_id(0) % blocks) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        source = token - (TAPS - 1 - tap)
        mask = ((source >= 0) & (source < tokens))[:, None] & inside[None, :]
        values = tl.load(x + source[:, None] * x_stride + channel[None, :], mask=mask, other=0.0)
        factor = tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0)
        total += values.to(tl.float32) * factor.to(tl.float32)[None, :]
    if SILU:
        total = total * tl.sigmoid(total)
    target = out + token[:, None] * channels + channel[None, :]
    tl.store(
        target, total.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & inside[None, :]
    )


def causal_conv(x: Tensor, weight: Tensor, *, silu: bool = False) -> Tensor:
    """Returns ``out[t, c] = act(sum_j weight[c, j] * x[t - taps + 1 + j, c])``.

    Args:
        x: [T, C]; tokens before the first are zeros.
        weight: [C, taps].
        silu: whether to apply SiLU.
    """
    rows = flat_rows(x)
    tokens, channels = rows.shape
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (triton.cdiv(tokens, TOKENS) * triton.cdiv(channels, CHANNELS),)
        _causal_conv_kernel[grid](
            rows,
            weight.contiguous(),
            out,
            tokens,
            channels,
            rows.stride(0),
            TAPS=weight.shape[1],
            SILU=silu,
            TOKENS=TOKENS,
            CHANNELS=CHANNELS,
        )
    return out
