"""Activation, modulation, embedding and rope against formulas in fp64."""

import math

import pytest
import torch

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def silu(x):
    return x / (1 + torch.exp(-x))


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("gated", [False, True])
def test_activation(row, strided, relative_error, name, gated, dtype):
    x = strided(3, 2, 14, dtype=dtype, std=2.0)
    kernel = f"torch.activation.{name}" + ("_and_mul" if gated else "")
    out = row(kernel)(x)
    expected = FORMULAS[name](x.double())
    if gated:
        expected = FORMULAS[name](x.double()[..., :7]) * x.double()[..., 7:]
    assert out.dtype == dtype
    assert out.shape == expected.shape
    assert relative_error(out, expected) < TOLERANCE[dtype]


def test_exact_and_tanh_gelu_differ(row):
    x = torch.linspace(-3, 3, 101)
    exact, approximate = row("torch.activation.gelu")(x), row("torch.activation.gelu_tanh")(x)
    assert 1e-4 < float((exact - approximate).abs().max()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_modulate(row, strided, relative_error, dtype):
    x = strided(2, 5, 7, dtype=dtype)
    scale, shift = strided(2, 7, dtype=dtype, seed=1), strided(2, 7, dtype=dtype, seed=2)
    run = row("torch.modulate")
    out = run(x, scale, shift)
    expected = x.double() * (1 + scale.double()[:, None]) + shift.double()[:, None]
    assert relative_error(out, expected) < (1e-6 if dtype == torch.float32 else 1e-2)
    assert torch.equal(run(x, scale[:, None], shift[:, None]), out)
    if dtype == torch.bfloat16:
        # Each step is rounded.
        factor = (1 + scale.float()).bfloat16()[:, None]
        product = (x.float() * factor.float()).bfloat16()
        assert torch.equal(out, (product.float() + shift.float()[:, None]).bfloat16())


def test_embedding_of_a_shard(row):
    weight = torch.arange(12.0).view(4, 3)
    ids = torch.tensor([[5, 8], [4, 9]])
    out = row("torch.embedding")(ids, weight, 5, 9)
    expected = torch.stack([weight[0], weight[3], torch.zeros(3), torch.zeros(3)]).view(2, 2, 3)
    assert torch.equal(out, expected)
    whole = row("torch.embedding")(torch.tensor([3, 0]), weight, 0, 4)
    assert torch.equal(whole, weight[[3, 0]])


def test_embedding_ignores_nan_outside_its_shard(row):
    weight = torch.full((3, 2), torch.nan)
    weight[1:] = 1.0
    out = row("torch.embedding")(torch.tensor([9, 1]), weight, 0, 3)
    assert torch.equal(out, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


def test_embedding_shard_larger_than_the_table(row):
    with pytest.raises(ValueError, match="shard 0:5 has more rows than the table's 4"):
        row("torch.embedding")(torch.tensor([0]), torch.zeros(4, 2), 0, 5)


def rope_cache(positions, width, theta=10000.0):
    rates = theta ** (-torch.arange(0, width, 2, dtype=torch.double) / width)
    angles = torch.arange(positions, dtype=torch.double)[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def rotate_one(vector, angles):
    """Turns the pairs (i, i + D/2) one by one with complex numbers."""
    half = vector.shape[0] // 2
    result = torch.empty_like(vector)
    for i in range(half):
        turned = complex(vector[i], vector[i + half]) * complex(
            math.cos(angles[i]), math.sin(angles[i])
        )
        result[i], result[i + half] = turned.real, turned.imag
    return result


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary"), [(2, 2), (10, 10), (10, 6)])
def test_rope(row, strided, relative_error, head_dim, rotary, dtype):
    positions = torch.tensor([0, 7, 3, 7, 30])
    q, k = strided(5, 3, head_dim, dtype=dtype), strided(5, 1, head_dim, dtype=dtype, seed=1)
    cache = rope_cache(31, rotary)
    before = q.clone()
    out_q, out_k = row("eager.rope")(positions, q, k, cache)
    assert torch.equal(q, before)
    rates = [10000.0 ** (-2 * i / rotary) for i in range(rotary // 2)]
    for given, out in ((q, out_q), (k, out_k)):
        assert out.dtype == dtype
        expected = given.double().clone()
        for t, position in enumerate(positions.tolist()):
            for head in range(given.shape[1]):
                angles = [position * rate for rate in rates]
                expected[t, head, :rotary] = rotate_one(expected[t, head, :rotary], angles)
        assert relative_error(out, expected) < TOLERANCE[dtype]
        assert torch.equal(out[..., rotary:], given[..., rotary:])


def test_rope_keeps_scores_relative(row):
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    cache, run = rope_cache(200, 64), row("eager.rope")

    def score(m, n):
        turned_q, _ = run(torch.tensor([m]), q, k, cache)
        _, turned_k = run(torch.tensor([n]), q, k, cache)
        return float((turned_q * turned_k).sum())

    assert score(10, 3) == pytest.approx(score(150, 143), abs=1e-3)
    assert abs(score(10, 3) - score(10, 9)) > 1e-2
