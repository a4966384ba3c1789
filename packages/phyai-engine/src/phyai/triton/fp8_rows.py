"""Rows rounded to FP8 with one scale each, alone and behind the activation or norm before them.

Each launcher rounds what the unfused operation would have stored, so fusing changes no code but
where values fall on a tie of both roundings.
"""

# ruff: noqa: ANN001, ANN202  # kernel arguments are pointers and integers
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from phyai.triton.activation import KINDS, _activate
from phyai.triton.rows import flat_rows

LARGEST = 448.0
"""Largest finite value of float8 e4m3."""
SCALE_FLOOR = 1e-12

_MOST_WARPS = 32
_LARGEST = tl.constexpr(LARGEST)
_SCALE_FLOOR = tl.constexpr(SCALE_FLOOR)


@triton.jit
def _store_codes(values, codes, scales, row, columns, mask, hidden):
    """Rounds one row of FP32 values; columns behind the mask are zero."""
    scale = tl.math.div_rn(tl.max(tl.abs(values), axis=0), _LARGEST)
    scale = tl.maximum(scale, _SCALE_FLOOR)
    tl.store(scales + row, scale)
    # What a division rounds to, at a third of its price: the remainder mends the product.
    inverse = tl.math.div_rn(1.0, scale)
    quotients = values * inverse
    remainder = tl.math.fma(-quotients, tl.zeros_like(values) + scale, values)
    quotients = tl.math.fma(remainder, tl.zeros_like(values) + inverse, quotients)
    quotients = tl.minimum(tl.maximum(quotients, -_LARGEST), _LARGEST)
    tl.store(codes + row * hidden + columns, quotients.to(codes.dtype.element_ty), mask=mask)


@triton.jit
def _activation_rows_kernel(
    x, codes, scales, rows, hidden, x_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Rounds every ``num_programs``-th row and asks for the next before it is done with one."""
    first, step = tl.program_id(0), tl.num_programs(0)
    row = first.to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    source = x + row * x_stride + columns
    left = tl.load(source, mask=mask, other=0.0)
    right = left
    if GATED:
        right = tl.load(source + hidden, mask=mask, other=0.0)
    for _ in tl.range(first, rows, step):
        following = row + step
        inside = mask & (following < rows)
        source = x + following * x_stride + columns
        next_left = tl.load(source, mask=inside, other=0.0)
        next_right = next_left
        if GATED:
            next_right = tl.load(source + hidden, mask=inside, other=0.0)
        values = left.to(tl.float32)
        if KIND >= 0:
            values = _activate(values, KIND)
            if GATED:
                values *= right.to(tl.float32)
            values = values.to(left.dtype).to(tl.float32)
        _store_codes(values, codes, scales, row, columns, mask, hidden)
        left, right = next_left, next_right
        row = following


@triton.jit
def _head_rows_kernel(
    x, codes, scales, hidden, row_stride, head_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    places = (columns // WIDTH).to(tl.int64) * head_stride + columns % WIDTH
    values = tl.load(x + row * row_stride + places, mask=mask, other=0.0).to(tl.float32)
    _store_codes(values, codes, scales, row, columns, mask, hidden)


@triton.jit
def _load_sum(
    source, residual, total, row, columns, mask, hidden, residual_stride, ADD: tl.constexpr
):
    """Loads one row in FP32, or stores its sum with the residual and rounds that like the row."""
    loaded = tl.load(source + columns, mask=mask, other=0.0)
    values = loaded.to(tl.float32)
    if ADD:
        added = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0)
        stored = (values + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * hidden + columns, stored, mask=mask)
        values = stored.to(loaded.dtype).to(tl.float32)
    return values


@triton.jit(do_not_specialize=["eps"])
def _norm_rows_kernel(
    x, residual, weight, codes, scales, total, hidden, x_stride, residual_stride, eps,
    ADD: tl.constexpr, CAST_FIRST: tl.constexpr, GEMMA: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    kind = x.dtype.element_ty
    values = _load_sum(
        x + row * x_stride, residual, total, row, columns, mask, hidden, residual_stride, ADD
    )
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if GEMMA:
        scale += 1.0
    values = values * tl.math.rsqrt(tl.sum(values * values, axis=0) / hidden + eps)
    if CAST_FIRST:
        values = values.to(kind).to(tl.float32)
    values = (values * scale).to(kind).to(tl.float32)
    _store_codes(values, codes, scales, row, columns, mask, hidden)


@triton.jit(do_not_specialize=["eps"])
def _layer_rows_kernel(
    x, residual, weight, bias, codes, scales, total, hidden, x_stride, residual_stride, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    kind = x.dtype.element_ty
    values = _load_sum(
        x + row * x_stride, residual, total, row, columns, mask, hidden, residual_stride, ADD
    )
    centered = tl.where(mask, values - tl.sum(values, axis=0) / hidden, 0.0)
    inverse = tl.math.rsqrt(tl.sum(centered * centered, axis=0) / hidden + eps)
    result = centered * inverse * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    result += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    _store_codes(result.to(kind).to(tl.float32), codes, scales, row, columns, mask, hidden)


def _empty_codes(rows: int, hidden: int, device: torch.device) -> tuple[Tensor, Tensor]:
    codes = torch.empty((rows, hidden), dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty(rows, dtype=torch.float32, device=device)


def _block(hidden: int) -> dict[str, int]:
    block = triton.next_power_of_2(hidden)
    return {"BLOCK": block, "num_warps": min(_MOST_WARPS, max(1, block // 512))}


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes [M, H] and scales [M] in fp32 of ``x`` [..., H]; a scale is max|row| / 448."""
    return activation_rows(x, None, gated=False)


def quantize_parts(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns codes [M, heads * head_dim] and scales [M] of rows that lie in several tensors.

    Args:
        parts: [T, heads, head_dim], any strides with features side by side.
    """
    heads, width = parts[0].shape[1:]
    hidden, rows = heads * width, sum(part.shape[0] for part in parts)
    codes, scales = _empty_codes(rows, hidden, parts[0].device)
    first = 0
    for part in parts:
        if part.numel():
            stop = first + part.shape[0]
            _head_rows_kernel[(part.shape[0],)](
                part, codes[first:stop], scales[first:stop], hidden, *part.stride()[:2],
                WIDTH=width, **_block(hidden),
            )  # fmt: skip
            first = stop
    return codes, scales


def activation_rows(x: Tensor, kind: str | None, *, gated: bool) -> tuple[Tensor, Tensor]:
    """Returns codes [M, H] and scales [M] of the activation of ``x``.

    Args:
        x: [..., H], or [..., 2 * H] when gated.
        kind: name of the activation, see `phyai.triton.activation.activation`; None for none.
        gated: whether the right half multiplies the activated left half.
    """
    rows = flat_rows(x)
    hidden = rows.shape[1] // 2 if gated else rows.shape[1]
    codes, scales = _empty_codes(rows.shape[0], hidden, x.device)
    if codes.numel():
        options = _block(hidden)
        programs = rows.shape[0]
        if options["num_warps"] == _MOST_WARPS:  # one program fills a multiprocessor
            programs = min(programs, _processors(x.device))
        _activation_rows_kernel[(programs,)](
            rows, codes, scales, rows.shape[0], hidden, rows.stride(0),
            KIND=-1 if kind is None else KINDS[kind], GATED=gated, **options,
        )  # fmt: skip
    return codes, scales


def rmsnorm_rows(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    cast_first: bool = False,
    gemma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes [M, H], scales [M] and the sum of the RMS norm of ``x + residual``.

    Args:
        x: [..., H].
        residual: [..., H]; without one the sum is ``x`` itself.
        weight: [H].
        eps: added to the mean square.
        cast_first: whether normalized values are rounded before their weight multiplies them.
        gemma: whether one plus the weight multiplies.
    """
    rows = flat_rows(x)
    added = None if residual is None else flat_rows(residual)
    codes, scales = _empty_codes(*rows.shape, x.device)
    total = x
    if residual is not None:
        total = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    if codes.numel():
        _norm_rows_kernel[(rows.shape[0],)](
            rows, added, weight, codes, scales, total, rows.shape[1], rows.stride(0),
            0 if added is None else added.stride(0), eps,
            ADD=added is not None, CAST_FIRST=cast_first, GEMMA=gemma, **_block(rows.shape[1]),
        )  # fmt: skip
    return codes, scales, total


def layernorm_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes [M, H], scales [M] and the sum of the layer norm of ``x + residual``.

    Args:
        x: [..., H].
        residual: [..., H]; without one the sum is ``x`` itself.
        weight: [H].
        bias: [H].
        eps: added to the variance.
    """
    rows = flat_rows(x)
    added = None if residual is None else flat_rows(residual)
    codes, scales = _empty_codes(*rows.shape, x.device)
    total = x
    if residual is not None:
        total = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    if codes.numel():
        _layer_rows_kernel[(rows.shape[0],)](
            rows, added, weight, bias, codes, scales, total, rows.shape[1], rows.stride(0),
            0 if added is None else added.stride(0), eps,
            ADD=added is not None, **_block(rows.shape[1]),
        )  # fmt: skip
    return codes, scales, total
