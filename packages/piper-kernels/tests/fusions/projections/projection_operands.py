"""Operands of projections to quantized queries, keys and values, and comparisons of codes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels.fusions.convrot_int8_sage_qk.operands import HeadProjection, PreparedInput
from piper_kernels.fusions.projected_qk.transform import HeadTransform


@dataclass(frozen=True)
class Operands:
    """What one projection reads; ``lengths`` are those of blocks or ``None``."""

    inputs: PreparedInput
    projection: HeadProjection
    transform: HeadTransform
    lengths: Tensor | None
    input_mean: Tensor

    def to(self, device):
        def moved(tensor):
            return None if tensor is None else tensor.to(device)

        p, t = self.projection, self.transform
        return Operands(
            PreparedInput(moved(self.inputs.qdata), moved(self.inputs.scale)),
            HeadProjection(moved(p.qdata), moved(p.scale), moved(p.bias), p.head_dim),
            HeadTransform(moved(t.weight), moved(t.cos), moved(t.sin), t.eps),
            moved(self.lengths),
            moved(self.input_mean),
        )


def operands(
    rows=193,
    features=64,
    heads=2,
    head_dim=128,
    rotary=96,
    *,
    batch=1,
    affine=torch.float32,
    bias=torch.float32,
    lengths=None,
    seed=0,
):
    """Return operands with weight scales of 0.001 to 0.011; dtypes of ``None`` leave parts out."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def codes(*shape):
        return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)

    outputs = heads * head_dim
    qdata = codes(batch, rows, features)
    scale = torch.rand(batch, rows, generator=generator) * 0.02 + 0.002
    weight_scale = torch.rand(outputs, 1, generator=generator) * 0.01 + 0.001
    angles = normal(rows, rotary) * 3
    norm = None if affine is None else (1 + 0.3 * normal(head_dim)).to(affine)
    if lengths is not None:
        lengths = torch.tensor(lengths, dtype=torch.int32)
    kept = torch.ones(rows, dtype=torch.bool)
    if lengths is not None:
        kept = (torch.arange(64) < lengths[:, None]).flatten()
    mean = (qdata.float() * scale[..., None])[:, kept].mean(1)
    return Operands(
        PreparedInput(qdata, scale),
        HeadProjection(
            codes(outputs, features),
            weight_scale,
            None if bias is None else normal(outputs).to(bias),
            head_dim,
        ),
        HeadTransform(norm, angles.cos(), angles.sin(), 1e-5),
        lengths,
        mean,
    )


def assert_codes(actual, expected, what, fraction=2e-3):
    """Check codes that may differ by one where a quotient is half way between two."""
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.dtype == torch.int8, (what, actual.dtype)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    difference = (actual.int() - expected.int()).abs()
    assert difference.max() <= 1, (what, difference.max())
    assert (difference > 0).double().mean() <= fraction, (what, (difference > 0).double().mean())


def assert_floats(actual, expected, what, rtol=1e-5, atol=1e-6):
    assert actual.is_contiguous(), what
    torch.testing.assert_close(
        actual.cpu(), expected.cpu(), rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}"
    )
