"""Attention of heads of any width against the portable row.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import sys

import torch

from phyai.kernels.attention import _eager
from phyai.triton.narrow_attention import narrow_attention

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
# The interpreter cuts values off where a GPU rounds them to bf16.
STEP = 6e-3 if DEVICE == "cuda" else 1.2e-2
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=GENERATOR).to(device=DEVICE, dtype=dtype)


def close(found, expected, what):
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < STEP, (what, float(error))


def check(batch, rows, keys, heads, kv_heads, dim, dtype=torch.bfloat16):
    what = (batch, rows, keys, heads, kv_heads, dim)
    q = normal(batch, rows, heads, dim, dtype=dtype)
    # Rows and features past the end are not-a-numbers.
    k, v = (torch.full((2, batch, keys + 3, kv_heads, dim + 8), torch.nan)).to(q)
    for tensor in (k, v):
        tensor[:, :keys, :, :dim] = normal(batch, keys, kv_heads, dim, dtype=dtype)
    k, v = (tensor[:, :keys, :, :dim] for tensor in (k, v))
    found = narrow_attention(q, k, v, scale=dim**-0.5)
    assert found.is_contiguous(), what
    close(found, _eager(q, k, v, scale=dim**-0.5), what)


def check_packed_projection():
    """Views into one projection, as the vision tower has them."""
    qkv = normal(2, 65, 3, 4, 72)
    q, k, v = qkv.unbind(2)
    close(narrow_attention(q, k, v, scale=0.1), _eager(q, k, v, scale=0.1), "packed")


def check_huge_scores():
    q, k, v = normal(1, 5, 1, 72) * 1e3, normal(1, 9, 1, 72) * 1e3, normal(1, 9, 1, 72)
    found = narrow_attention(q, k, v, scale=1.0)
    assert found.isfinite().all()
    close(found, _eager(q, k, v, scale=1.0), "huge scores")


def check_edges():
    q, empty = normal(1, 3, 2, 72), normal(1, 0, 2, 72)
    assert torch.equal(narrow_attention(q, empty, empty, scale=1.0), torch.zeros_like(q))
    assert narrow_attention(empty, q, q, scale=1.0).shape == (1, 0, 2, 72)


def main():
    check(1, 1, 1, 1, 1, 72)
    check(2, 65, 63, 4, 2, 72)
    check(1, 64, 129, 2, 1, 80)
    check(1, 7, 70, 1, 1, 32)
    check(1, 67, 5, 2, 2, 128)
    check(1, 17, 65, 1, 1, 120, torch.float16)
    check_packed_projection()
    check_huge_scores()
    check_edges()


if __name__ == "__main__":
    main()
    print("checks passed")
