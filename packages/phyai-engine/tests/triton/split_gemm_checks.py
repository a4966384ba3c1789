"""Split fp32 products against float64. Run with ``TRITON_INTERPRET=1``, or with ``cuda``."""

import sys

import torch

from phyai.triton.split_gemm import split_gemm

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(shape, generator=GENERATOR).to(DEVICE)


def check(rows, columns, depth):
    wide = torch.full((rows, depth + 5), torch.nan, device=DEVICE)
    # Views that a 16-byte access cannot read, and one that it can.
    for x in (
        normal(rows, depth),
        wide[:, :depth].copy_(normal(rows, depth)),
        wide[:, 1 : 1 + depth],
    ):
        x.copy_(normal(rows, depth))
        weight, bias = normal(columns, depth), normal(columns)
        for shift in (bias, None):
            found = split_gemm(x, weight, shift)
            expected = x.double() @ weight.double().T
            expected = expected if shift is None else expected + shift.double()
            error = (found - expected).norm() / expected.norm()
            # TF32 alone would leave 3e-4.
            assert error < 2e-6, (rows, columns, depth, float(error))


for shape in ((1, 1, 4), (65, 70, 36), (130, 64, 588)):
    check(*shape)
assert split_gemm(normal(2, 0, 8), normal(3, 8), None).shape == (2, 0, 3)
print("checks passed")
