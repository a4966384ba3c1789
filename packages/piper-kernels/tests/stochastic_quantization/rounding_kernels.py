"""Kernels around the device functions, and their numeric check.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import sys

import torch
import triton
import triton.language as tl

from piper_kernels.stochastic_quantization import triton as rounding

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"


@triton.jit
def uniform_kernel(out, seed, first, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    offsets = tl.full((BLOCK,), first, tl.int64) + index
    tl.store(out + index, rounding.random_uniform(seed, offsets))


@triton.jit
def narrow_uniform_kernel(out, seed, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out + index, rounding.random_uniform(seed, index))


@triton.jit
def round_kernel(values, deterministic, out, seed, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    value = tl.load(values + index, mask=mask, other=0.0)
    nearest = tl.load(deterministic + index, mask=mask, other=0)
    code = rounding.stochastic_round_to_int(value, nearest, seed, index, -128, 127)
    tl.store(out + index, code, mask=mask)


def philox_uniform(seed: int, offset: int) -> float:
    """Philox-4x32-10 of Salmon et al. (2011) in Python integers, first word only."""
    mask = 0xFFFFFFFF
    counter = [offset & mask, offset >> 32, 0, 0]
    key = [seed & mask, (seed >> 32) & mask]
    for _ in range(10):
        high, low = 0xCD9E8D57 * counter[2], 0xD2511F53 * counter[0]
        counter = [
            (high >> 32) ^ counter[1] ^ key[0],
            high & mask,
            (low >> 32) ^ counter[3] ^ key[1],
            low & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    word = counter[0]
    signed = word if word < 1 << 31 else ~word & mask
    return signed * 4.6566127342e-10


def draw(seed: int, first: int, count: int = 64) -> torch.Tensor:
    out = torch.full((count,), torch.nan, device=DEVICE)
    uniform_kernel[(1,)](out, rounding.seed_argument(seed), first, BLOCK=count)
    return out.cpu()


def check_known_answer() -> None:
    # The published vector of Philox-4x32-10 for counter 0 and key 0 starts with 6627e8d5.
    assert philox_uniform(0, 0) == 0x6627E8D5 * 4.6566127342e-10


def check_uniform() -> None:
    for seed in (0, 7, 2**63 - 1, 2**63, 2**64 - 1):
        for first in (0, 2**31 - 32, 2**32 - 32, 2**32, 2**40 + 5):
            expected = [philox_uniform(seed, first + i) for i in range(64)]
            torch.testing.assert_close(draw(seed, first), torch.tensor(expected), rtol=1e-6, atol=0)
    assert not torch.equal(draw(3, 0), draw(3, 2**32))
    assert draw(3, 0).unique().numel() == 64
    narrow = torch.empty(64, device=DEVICE)
    narrow_uniform_kernel[(1,)](narrow, 3, BLOCK=64)
    assert torch.equal(narrow.cpu(), draw(3, 0))


def round_all(values: torch.Tensor, seed: int, block: int) -> torch.Tensor:
    values = values.to(DEVICE)
    nearest = values.nan_to_num(0, 127, -128).round().clamp(-128, 127).to(torch.int8)
    out = torch.full_like(nearest, 99)
    size = values.numel()
    round_kernel[(triton.cdiv(size, block),)](values, nearest, out, seed, size, BLOCK=block)
    return out.cpu()


def check_rounding() -> None:
    values = torch.tensor(
        [0, 0.5, 1.25, -0.75, 126.5, 127, 127.4, -128, -130, torch.nan, torch.inf, -torch.inf, 3]
    )
    draws = torch.tensor([philox_uniform(7, i) for i in range(13)])
    lower = values.floor()
    expected = lower + (draws < values - lower)
    fixed = torch.tensor([0, 0, 0, 0, 0, 127, 127, -128, -128, 0, 127, -128, 3])
    interior = torch.tensor([0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0], dtype=torch.bool)
    expected = torch.where(interior, expected, fixed).to(torch.int8)
    # The launch geometry must not change the samples.
    for block in (4, 16, 32):
        assert torch.equal(round_all(values, 7, block), expected), block
    many = torch.full((1 << 14,), 5.25)
    mean = round_all(many, 11, 1024).float().mean().item()
    assert abs(mean - 5.25) < 0.02, mean


if __name__ == "__main__":
    check_known_answer()
    check_uniform()
    check_rounding()
    print("rounding checks passed")
