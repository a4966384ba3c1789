import pytest
import torch

from piper_kernels.stochastic_quantization import signed_seed
from piper_kernels.stochastic_quantization._seed import validate_seed


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(0, 0), (5, 5), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)],
)
def test_signed_seed_keeps_the_bit_pattern(seed, expected):
    assert signed_seed(seed) == expected
    assert signed_seed(seed) % 2**64 == seed


def test_torch_maps_both_forms_to_one_state():
    for seed in (2**63, 2**64 - 1):
        states = [torch.Generator().manual_seed(s).get_state() for s in (seed, signed_seed(seed))]
        assert torch.equal(*states)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_valid_seeds(seed):
    validate_seed(seed)


@pytest.mark.parametrize("seed", [True, False, 1.0, "1", None])
def test_seed_types(seed):
    with pytest.raises(TypeError, match="unsigned 64-bit integer"):
        validate_seed(seed)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_range(seed):
    with pytest.raises(ValueError, match="unsigned 64-bit integer"):
        validate_seed(seed)
