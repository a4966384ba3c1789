"""Channels-last maps: the channel norm with SiLU, and sums behind convolutions.

All read a convolution's output once and add its bias on the way, which cuDNN would do in a pass of
its own. Each launcher has the contract of the function of its name in
``phyai.models.cosmos3.vae``.
"""

# ruff: noqa: ANN001  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl
from torch import Tensor

_VALUES = 4096  # of one program: 32 for each of its 128 threads


@triton.jit
def _tile(rows, channels, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # noqa: ANN202
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (channel < channels)[None, :]
    return row[:, None] * channels + channel[None, :], channel, mask


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x,
    gain,
    bias,
    out,
    rows,
    channels,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    offsets, channel, mask = _tile(rows, channels, ROWS, BLOCK)
    values = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
        values += shift[None, :]
    length = tl.maximum(tl.sqrt(tl.sum(values * values, axis=1)), 1e-12)
    scale = tl.load(gain + channel, mask=channel < channels, other=0.0)
    result = values / length[:, None] * scale[None, :]
    if SILU:
        result = result * tl.sigmoid(result)
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _add_kernel(
    x,
    bias,
    residual,
    rows,
    channels,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    offsets, channel, mask = _tile(rows, channels, ROWS, BLOCK)
    values = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
    other = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    result = values + shift[None, :] + other
    tl.store(x + offsets, result.to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["positions"])
def _spread_kernel(
    phases,
    bias,
    source,
    out,
    positions,
    rows,
    columns,
    channels,
    inputs,
    STEPS: tl.constexpr,
    FIRST: tl.constexpr,
    CELL: tl.constexpr,
    REPEATS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # Positions of the output [T', 2 * rows, 2 * columns]: few enough for quick 32-bit divisions.
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    mask = (place < positions)[:, None] & (channel < channels)[None, :]
    line, x = place // (2 * columns), place % (2 * columns)
    frame, y = line // (2 * rows), line % (2 * rows)
    row, column, down, right = y // 2, x // 2, y % 2, x % 2
    phase = (frame * (rows + 1) + row + down) * (columns + 1) + column + right
    offsets = (phase.to(tl.int64) * 4 + 2 * down + right) * channels
    values = tl.load(phases + offsets[:, None] + channel[None, :], mask=mask, other=0.0)
    shift = tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
    part = (frame % STEPS + FIRST) * 4 + 2 * down + right
    cell = ((frame // STEPS * rows + row) * columns + column).to(tl.int64) * inputs
    # Channels that fill whole cells are read side by side.
    if CELL == REPEATS:
        taken = channel[None, :]
    else:
        taken = (channel[None, :] * CELL + part[:, None]) // REPEATS
    given = tl.load(source + cell[:, None] + taken, mask=mask, other=0.0).to(tl.float32)
    result = values.to(tl.float32) + shift[None, :] + given
    offsets = place.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)


def _blocks(rows: int, channels: int) -> tuple[tuple[int], dict[str, int]]:
    block = triton.next_power_of_2(channels)
    height = max(1, _VALUES // block)
    return (triton.cdiv(rows, height),), {"ROWS": height, "BLOCK": block, "num_warps": 4}


def channel_norm(
    x: Tensor, gain: Tensor, bias: Tensor | None, *, silu: bool, out: Tensor
) -> Tensor:
    """Writes the norm of ``x + bias`` times ``gain``, through SiLU if asked, to ``out``.

    Args:
        x: [..., C], contiguous.
        gain: [C] in fp32.
        bias: [C] or None.
        silu: whether SiLU follows.
        out: like ``x``, contiguous.
    """
    rows, channels = x.numel() // x.shape[-1], x.shape[-1]
    grid, blocks = _blocks(rows, channels)
    if rows:
        _norm_kernel[grid](
            x, gain, bias, out, rows, channels, HAS_BIAS=bias is not None, SILU=silu, **blocks
        )
    return out


def add_bias_residual(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """Adds ``bias`` [C] and ``residual`` to ``x`` [..., C], which is overwritten.

    All are contiguous.
    """
    rows, channels = x.numel() // x.shape[-1], x.shape[-1]
    grid, blocks = _blocks(rows, channels)
    if rows:
        _add_kernel[grid](x, bias, residual, rows, channels, **blocks)
    return x


def spread(phases: Tensor, bias: Tensor, source: Tensor, time: int) -> Tensor:
    """Interleaves the outputs of cells and adds bias and the block's input.

    Args:
        phases: [T', H + 1, W + 1, 4 * C], contiguous.
        bias: [C].
        source: [T, H, W, I], contiguous.
        time: frames of a cell.

    Returns:
        [T', 2H, 2W, C].
    """
    frames, rows, columns, inputs = source.shape
    channels, steps = len(bias), phases.shape[0] // frames
    out = phases.new_empty(phases.shape[0], 2 * rows, 2 * columns, channels)
    positions = out.numel() // channels
    grid, blocks = _blocks(positions, channels)
    _spread_kernel[grid](
        phases,
        bias,
        source,
        out,
        positions,
        rows,
        columns,
        channels,
        inputs,
        STEPS=steps,
        FIRST=time - steps,
        CELL=4 * time,
        REPEATS=4 * time * channels // inputs,
        **blocks,
    )
    return out
