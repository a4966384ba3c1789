import pytest
import torch

from piper_kernels.stochastic_quantization import (
    stochastic_codebook_indices,
    stochastic_round_to_int,
)

NAN, INF = float("nan"), float("inf")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nearest(values, low=-128, high=127):
    return values.float().nan_to_num(0, high, low).round().clamp(low, high).to(torch.int64)


def round_int8(values, seed=7):
    return stochastic_round_to_int(
        values, seed=seed, quant_min=-128, quant_max=127, deterministic=nearest(values)
    )


def test_golden_rounding():
    values = torch.tensor([0, 0.5, 1.25, -0.75, 126.5, 127, 127.4, -128, -130, NAN, INF, 3])
    result = round_int8(values)
    assert result.dtype == torch.int64
    assert result.tolist() == [0, 1, 1, -1, 127, 127, 127, -128, -128, 0, 127, 3]


def test_matches_an_elementwise_loop():
    values = torch.randn(7, 13, generator=torch.Generator().manual_seed(1)) * 90
    draw = torch.rand(values.shape, generator=torch.Generator().manual_seed(42))
    expected = torch.empty(values.shape, dtype=torch.int64)
    for row in range(7):
        for column in range(13):
            value = values[row, column].item()
            low = int(value // 1)
            if -128 < value < 127 and value != low:
                expected[row, column] = low + (draw[row, column].item() < value - low)
            else:
                expected[row, column] = max(-128, min(127, round(value)))
    assert torch.equal(round_int8(values, seed=42), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 0, 3), (3, 17)])
def test_shapes_and_dtypes(dtype, shape):
    values = torch.full(shape, 2.5, dtype=dtype)
    result = round_int8(values)
    assert result.shape == values.shape
    assert set(result.flatten().tolist()) <= {2, 3}


def test_is_unbiased_on_a_strided_view():
    values = torch.full((256, 512), 10.3)[:, ::2]
    result = round_int8(values, seed=2**64 - 1)
    assert set(result.unique().tolist()) == {10, 11}
    assert result.double().mean().item() == pytest.approx(10.3, abs=0.01)


def test_exact_and_outer_values_take_the_deterministic_code():
    values = torch.tensor([4.0, -128.0, 127.0, 500.0, -500.0, NAN, INF, -INF])
    fixed = torch.arange(8) + 50
    result = stochastic_round_to_int(
        values, seed=3, quant_min=-128, quant_max=127, deterministic=fixed
    )
    assert torch.equal(result, fixed)


def test_replays_and_leaves_the_global_generator_alone():
    values = torch.full((4096,), 0.5)
    state = torch.get_rng_state()
    first, second, other = (round_int8(values, seed) for seed in (2**64 - 1, 2**64 - 1, 2**64 - 2))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(first, round_int8(values, -1))


def test_shape_mismatch():
    with pytest.raises(ValueError, match="deterministic must have the shape of values"):
        stochastic_round_to_int(
            torch.zeros(3), seed=0, quant_min=-1, quant_max=1, deterministic=torch.zeros(4)
        )


def pick(values, codebook=E2M1, seed=11, fixed=99):
    return stochastic_codebook_indices(
        values, codebook, seed=seed, deterministic=torch.full(values.shape, fixed)
    )


def test_golden_codebook():
    values = torch.tensor([0.1, 0.3, 2.4, 5, -0.1, -2.4, 6, 7, -6, 0])
    assert pick(values).tolist() == [1, 1, 4, 7, 0, 13, 99, 99, 99, 99]


def test_shuffled_codebook_is_unbiased():
    order = torch.tensor([3, 0, 2, 1])
    codebook = torch.tensor([0.0, 1.0, 2.0, 4.0])[order]
    values = torch.full((2**16,), 1.5)
    state = torch.get_rng_state()
    indices = pick(values, codebook, seed=2**64 - 1)
    assert torch.equal(state, torch.get_rng_state())
    assert codebook[indices].mean().item() == pytest.approx(1.5, abs=0.01)
    assert set(codebook[indices].unique().tolist()) == {1.0, 2.0}
    assert torch.equal(indices, pick(values, codebook, seed=2**64 - 1))


def test_probability_follows_uneven_spacing():
    values = torch.full((2**16,), 4.5)
    assert E2M1[pick(values)].mean().item() == pytest.approx(4.5, abs=0.02)


def test_codebook_ignores_non_finite_entries():
    codebook = torch.tensor([NAN, 2.0, -INF, 1.0, INF])
    indices = pick(torch.tensor([1.5, NAN, INF, -INF, 1.0, 2.0, 1.9]), codebook)
    assert indices[0] in (1, 3)
    assert indices[6] in (1, 3)
    assert indices[1:6].tolist() == [99] * 5


@pytest.mark.parametrize("codebook", [torch.zeros(1), torch.zeros(2, 2), torch.zeros(0)])
def test_codebook_shape(codebook):
    with pytest.raises(ValueError, match="1-D with at least 2 entries"):
        pick(torch.zeros(2), codebook)


def test_codebook_without_finite_entries():
    with pytest.raises(ValueError, match="at least one finite entry"):
        pick(torch.zeros(2), torch.tensor([NAN, INF]))


def test_codebook_shape_mismatch():
    with pytest.raises(ValueError, match="deterministic must have the shape"):
        stochastic_codebook_indices(torch.zeros(2), E2M1, seed=0, deterministic=torch.zeros(3))
