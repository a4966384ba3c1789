import pytest
import torch

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}
SHAPES = [(1, 1), (3, 7), (2, 5, 65), (4, 257)]
EPS = 1e-6


def rms64(x, eps=EPS):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", ["rms", "gemma"])
def test_rmsnorm(row, strided, relative_error, shape, variant, dtype):
    x, weight = strided(*shape, dtype=dtype), strided(shape[-1], seed=1)
    out = row("torch.rmsnorm", **{"attrs.variant": variant})(x, weight, EPS)
    factor = weight.double() + (1 if variant == "gemma" else 0)
    assert out.dtype == dtype
    assert out.shape == x.shape
    assert relative_error(out, rms64(x) * factor) < TOLERANCE[dtype]


@pytest.mark.parametrize("variant", ["rms", "gemma"])
def test_rmsnorm_add_is_add_then_norm(row, strided, relative_error, variant, dtype):
    x, residual = strided(3, 7, dtype=dtype), strided(3, 7, dtype=dtype, seed=1)
    weight = strided(7, seed=2)
    before = x.clone(), residual.clone()
    facts = {"attrs.variant": variant}
    out, total = row("torch.rmsnorm_add", **facts)(x, residual, weight, EPS)
    assert torch.equal(total, (x.double() + residual.double()).to(dtype))
    assert torch.equal(out, row("torch.rmsnorm", **facts)(total, weight, EPS))
    factor = weight.double() + (1 if variant == "gemma" else 0)
    assert relative_error(out, rms64(total) * factor) < TOLERANCE[dtype]
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layernorm(row, strided, relative_error, shape, with_bias, dtype):
    x, weight = strided(*shape, dtype=dtype), strided(shape[-1], seed=1)
    bias = strided(shape[-1], seed=2) if with_bias else None
    out = row("torch.layernorm")(x, weight, bias, EPS)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    if bias is not None:
        expected = expected + bias.double()
    assert out.dtype == dtype
    assert relative_error(out, expected) < (2 * TOLERANCE[dtype] if shape[-1] > 1 else 1e-2)


@pytest.mark.parametrize("rows", ["one", "each"])
def test_adarmsnorm_order_is_scale_shift_gate(row, strided, relative_error, rows, dtype):
    tokens, width = 5, 13
    x = strided(tokens, width, dtype=dtype)
    modulation = strided(1 if rows == "one" else tokens, 3 * width, seed=1)
    out, gate = row("torch.adarmsnorm")(x, modulation, EPS)
    scale, shift, expected_gate = modulation.double().split(width, dim=-1)
    assert relative_error(out, rms64(x) * (1 + scale) + shift) < TOLERANCE[dtype]
    assert torch.equal(gate.double(), expected_gate)
    assert out.dtype == dtype
    assert gate.dtype == modulation.dtype
    assert gate.shape == (modulation.shape[0], width)


def test_zero_and_huge_rows(row):
    x = torch.zeros(2, 8)
    x[1] = 3e18
    weight = torch.ones(8)
    out = row("torch.rmsnorm", **{"attrs.variant": "rms"})(x, weight, EPS)
    assert torch.equal(out[0], torch.zeros(8))
    torch.testing.assert_close(out[1], torch.ones(8))
    # In fp16 the squares overflow; the reduction is in fp32.
    half = torch.full((1, 8), 3e4, dtype=torch.float16)
    assert torch.equal(
        row("torch.rmsnorm", **{"attrs.variant": "rms"})(half, weight, EPS), torch.ones_like(half)
    )


@pytest.mark.parametrize("kernel_id", ["torch.rmsnorm", "torch.layernorm", "torch.adarmsnorm"])
def test_references_are_differentiable(row, kernel_id):
    x = torch.randn(3, 6, dtype=torch.double, requires_grad=True)
    weight = torch.randn(18 if "ada" in kernel_id else 6, requires_grad=True)
    run = row(kernel_id, **{"attrs.variant": "gemma"})
    args = {
        "torch.rmsnorm": (weight, EPS),
        "torch.layernorm": (weight, None, EPS),
        "torch.adarmsnorm": (weight, EPS),
    }[kernel_id]
    out = run(x, *args)
    (out[0] if isinstance(out, tuple) else out).square().sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert float(x.grad.abs().sum()) > 0
    assert float(weight.grad.abs().sum()) > 0
