import pytest
import torch

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def rms64(x):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("gate_rows", [1, 5])
def test_adarmsnorm_add_gates_the_update_not_the_residual(
    row, strided, relative_error, gate_rows, dtype
):
    x, residual = strided(5, 13, dtype=dtype), strided(5, 13, dtype=dtype, seed=1)
    gate, modulation = strided(gate_rows, 13, seed=2), strided(1, 39, seed=3)
    out, total, following = row("torch.adarmsnorm_add")(x, residual, gate, modulation, EPS)
    expected = residual.double() + gate.double() * x.double()
    scale, shift, next_gate = modulation.double().split(13, dim=-1)
    assert relative_error(total, expected) < TOLERANCE[dtype]
    assert relative_error(out, rms64(total) * (1 + scale) + shift) < TOLERANCE[dtype]
    assert torch.equal(following.double(), next_gate)
    assert out.dtype == total.dtype == dtype


def test_rmsnorm_silu_mul(row, strided, relative_error, dtype):
    x, gate, weight = strided(3, 7, dtype=dtype), strided(3, 7, dtype=dtype, seed=1), strided(7)
    out = row("torch.rmsnorm_silu_mul")(x, gate, weight, EPS)
    wide = gate.double()
    expected = rms64(x) * weight.double() * wide / (1 + (-wide).exp())
    assert out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("channel_first", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_channel_l2_norm(row, strided, relative_error, channel_first, with_bias, dtype):
    x = strided(2, 3, 4, 5, dtype=dtype)
    channels = 3 if channel_first else 5
    weight, bias = strided(channels, seed=1), strided(channels, seed=2) if with_bias else None
    out = row("torch.channel_l2_norm")(
        x, weight, bias, 1e-12, channel_first=channel_first, compute_dtype=torch.float32
    )
    wide = (x if channel_first else x.movedim(-1, 1)).double()
    expected = wide / wide.pow(2).sum(1, keepdim=True).sqrt() * channels**0.5
    expected = expected * weight.double().view(-1, 1, 1)
    if bias is not None:
        expected = expected + bias.double().view(-1, 1, 1)
    expected = expected if channel_first else expected.movedim(1, -1)
    assert out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]


def test_channel_l2_norm_of_zeros_is_the_bias(row):
    bias = torch.tensor([1.0, 2.0])
    out = row("torch.channel_l2_norm")(
        torch.zeros(1, 2, 3),
        torch.ones(2),
        bias,
        1e-12,
        channel_first=True,
        compute_dtype=torch.float32,
    )
    assert torch.equal(out, bias.view(1, 2, 1).expand(1, 2, 3))


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("taps", [1, 4])
def test_causal_conv_reads_no_later_token(row, strided, relative_error, activation, taps):
    x, weight = strided(6, 5), strided(5, taps, seed=1)
    run = row("torch.causal_conv", **{"attrs.activation": activation})
    parts = run(x, weight, [2, 3])
    expected = torch.zeros(6, 5, dtype=torch.float64)
    for token in range(6):
        for tap in range(taps):
            source = token - taps + 1 + tap
            if source >= 0:
                expected[token] += x[source].double() * weight[:, tap].double()
    if activation == "silu":
        expected = expected / (1 + (-expected).exp())
    assert [part.shape for part in parts] == [(6, 2), (6, 3)]
    assert relative_error(torch.cat(parts, dim=-1), expected) < 1e-6
    changed = x.clone()
    changed[3:] = 7.0
    again = torch.cat(run(changed, weight, [2, 3]), dim=-1)
    assert torch.equal(again[:3], torch.cat(parts, dim=-1)[:3])


def test_interleaved_rope_turns_neighbours(row):
    angle = torch.tensor([0.3, 1.1])
    cache = torch.cat((angle.cos(), angle.sin())).unsqueeze(0)
    q = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]])
    run = row("eager.rope", **{"attrs.interleave": True})
    out, _ = run(torch.tensor([0]), q, q, cache)
    c, s = angle.cos(), angle.sin()
    expected = torch.stack(
        (c[0] - 2 * s[0], 2 * c[0] + s[0], 3 * c[1] - 4 * s[1], 4 * c[1] + 3 * s[1], q[0, 0, 4])
    )
    torch.testing.assert_close(out[0, 0], expected)
