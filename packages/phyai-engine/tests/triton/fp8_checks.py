"""Rows rounded to FP8 against plain torch: codes, scales and sums. Part of ``kernel_checks``."""

import sys
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from phyai.triton import fp8_rows

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
# The interpreter cuts codes off where a GPU rounds them: an eighth instead of a sixteenth.
STEP = 0.07 if DEVICE == "cuda" else 0.13
BF16_SLACK = 1e-2 if DEVICE == "cuda" else 2.5e-2
GENERATOR = torch.Generator().manual_seed(0)
EPS = 1e-6


def rows(count: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Returns rows of very different sizes, views of a NaN-filled buffer; the second is zero."""
    values = torch.randn(count, hidden, generator=GENERATOR)
    values *= torch.logspace(-3, 3, count)[:, None]
    values[1:2] = 0
    buffer = torch.full((count, hidden + 3), torch.nan, dtype=dtype, device=DEVICE)
    buffer[:, 1 : 1 + hidden] = values.to(dtype).to(DEVICE)
    return buffer[:, 1 : 1 + hidden]


def check(
    codes: Tensor, scales: Tensor, expected: Tensor, what: object, *, cancelled: float = 0.0
) -> None:
    """Compares; ``cancelled`` is the share of a row's maximum that rounded terms may leave over."""
    wanted = (expected.float().abs().amax(1) / 448).clamp_min(1e-12)
    slack = 1e-5 if expected.dtype == torch.float32 else BF16_SLACK  # of the rounding before
    torch.testing.assert_close(scales, wanted, rtol=slack, atol=0)
    found = codes.float() * scales[:, None]
    bound = STEP * expected.float().abs() + 2 * scales[:, None] * 2**-9 + slack * wanted[:, None]
    bound += cancelled * 448 * wanted[:, None]
    right = (found - expected.float()).abs() <= bound
    if DEVICE == "cpu":  # Triton's interpreter loses the carry into the exponent: 127.9 becomes 64
        right |= (2 * found - expected.float()).abs() <= bound
    assert right.all(), what


def check_quantize() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count, hidden in ((1, 1), (5, 257), (3, 64)):
            x = rows(count, hidden, dtype)
            codes, scales = fp8_rows.quantize_rows(x)
            assert codes.dtype == torch.float8_e4m3fn
            check(codes, scales, x, (dtype, count, hidden))
            if DEVICE == "cuda":
                exact = (x.float() / scales[:, None]).to(torch.float8_e4m3fn)
                assert torch.equal(codes.float(), exact.float()), (dtype, count, hidden)
    parts = [rows(3, 48, torch.bfloat16), rows(2, 48, torch.bfloat16)]
    by_heads = [part.unflatten(1, (3, 16)) for part in parts]
    heads_first = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in by_heads]
    for heads in (by_heads, heads_first):
        joined = fp8_rows.quantize_parts([heads[0], heads[0][:0], heads[1]])
        for found, expected in zip(joined, fp8_rows.quantize_rows(torch.cat(parts)), strict=True):
            assert torch.equal(found.float(), expected.float())
    codes, scales = fp8_rows.quantize_rows(rows(4, 24, torch.bfloat16).view(4, 24)[:0])
    assert (codes.shape, scales.shape) == ((0, 24), (0,))


def check_activations() -> None:
    functions = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": partial(functional.gelu, approximate="tanh"),
        "relu2": lambda x: functional.relu(x).square(),
    }
    for dtype in (torch.float32, torch.bfloat16):
        for kind, function in functions.items():
            for gated in (False, True):
                x = rows(5, 2 * 77, dtype).clamp(-60, 60)
                left, right = x.float().chunk(2, dim=1) if gated else (x.float(), None)
                expected = function(left)
                if right is not None:
                    expected = expected * right
                codes, scales = fp8_rows.activation_rows(x, kind, gated=gated)
                check(codes, scales, expected.to(dtype), (dtype, kind, gated))


def check_long_rows() -> None:
    """Rows of which a multiprocessor holds one: programs go through several."""
    processors = fp8_rows._processors
    if DEVICE == "cpu":
        fp8_rows._processors = lambda _: 2
    for count in (1, 2, 5, 200):
        if count == 200 and DEVICE == "cpu":
            continue
        x = rows(count, 2 * 9001, torch.bfloat16).clamp(-60, 60)
        left, right = x.float().chunk(2, dim=1)
        expected = (functional.gelu(left, approximate="tanh") * right).bfloat16()
        check(*fp8_rows.activation_rows(x, "gelu_tanh", gated=True), expected, count)
    fp8_rows._processors = processors


def check_norms() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for cast_first in (False, True):
            x, residual = rows(5, 257, dtype), rows(5, 257, torch.float32)
            weight = torch.rand(257, generator=GENERATOR).to(DEVICE) + 0.5
            for added in (None, residual):
                total = x if added is None else x.float() + added
                wide = total.to(dtype).float()
                normed = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS)
                found = fp8_rows.rmsnorm_rows(x, added, weight, EPS, cast_first=cast_first)
                check(*found[:2], (normed * weight).to(dtype), (dtype, cast_first))
                assert torch.equal(found[2].nan_to_num(), total.nan_to_num())
                found = fp8_rows.rmsnorm_rows(
                    x, added, weight - 1, EPS, cast_first=cast_first, gemma=True
                )
                check(*found[:2], (normed * (weight - 1 + 1)).to(dtype), (dtype, "gemma"))


def check_layer_norms() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, residual = rows(5, 257, dtype), rows(5, 257, torch.float32)
        weight = torch.rand(257, generator=GENERATOR).to(DEVICE) + 0.5
        bias = torch.randn(257, generator=GENERATOR).to(DEVICE)
        for added in (None, residual):
            total = x if added is None else x.float() + added
            wide = total.to(dtype).double()
            normed = functional.layer_norm(wide, (257,), weight.double(), bias.double(), EPS)
            found = fp8_rows.layernorm_rows(x, added, weight, bias, EPS)
            left = 0.0 if dtype == torch.float32 else BF16_SLACK
            check(*found[:2], normed.to(dtype), dtype, cancelled=left)
            assert torch.equal(found[2].nan_to_num(), total.nan_to_num())
    codes, scales, _ = fp8_rows.layernorm_rows(x[:0], None, weight, bias, EPS)
    assert (codes.shape, scales.shape) == ((0, 257), (0,))


def run() -> None:
    check_quantize()
    check_activations()
    check_long_rows()
    check_norms()
    check_layer_norms()
