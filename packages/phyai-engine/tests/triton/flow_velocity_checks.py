"""Adaptive norm with a projection against float64. Run with ``TRITON_INTERPRET=1``, or ``cuda``."""

import sys

import torch

from phyai.triton.flow_velocity import flow_velocity

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=GENERATOR).to(device=DEVICE, dtype=dtype)


def check(rows, width, count, dtype):
    """Rows of very different sizes, one of them zero, in a view of a NaN-filled buffer."""
    wide = torch.full((rows, width + 3), torch.nan, dtype=dtype, device=DEVICE)
    x = wide[:, 1 : 1 + width]
    x.copy_(normal(rows, width) * torch.logspace(-2, 2, rows, device=DEVICE)[:, None])
    x[rows // 2] = 0
    modulation, weight, bias = normal(1, 3 * width), normal(count, width), normal(count)
    modulation[:, 2 * width :] = torch.nan  # a gate that nothing reads
    values = x.double()
    normed = values * (values.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    scale, shift = modulation.double()[:, : 2 * width].chunk(2, 1)
    expected = (normed * (1 + scale) + shift) @ weight.double().T
    for added in (bias, None):
        found = flow_velocity(x, modulation, weight, added, 1e-6)
        wanted = expected if added is None else expected + added.double()
        assert found.dtype == torch.float32
        error = (found - wanted).norm() / wanted.norm()
        assert error < 1e-6, (rows, width, count, dtype, float(error))


for shape in ((1, 1, 1), (50, 1024, 32), (7, 257, 33), (3, 2048, 7)):
    for kind in (torch.bfloat16, torch.float16):
        check(*shape, kind)
none = flow_velocity(normal(0, 8), normal(1, 24), normal(5, 8), None, 1e-6)
assert none.shape == (0, 5)
print("checks passed")
