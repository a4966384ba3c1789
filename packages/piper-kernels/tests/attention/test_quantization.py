import pytest
import torch
from attention_oracle import grouped_codes

from piper_kernels.attention._quantization import (
    Granularity,
    quantize_groups,
    quantize_key,
    quantize_value_rows,
)


@pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.name)
@pytest.mark.parametrize("kind", ["query", "key"])
@pytest.mark.parametrize("rows", [1, 2, 9, 63, 64, 65, 129])
def test_groups_share_the_scale_of_their_largest_magnitude(rows, kind, granularity):
    x = torch.randn(2, rows, 64, generator=torch.Generator().manual_seed(rows))
    x *= torch.logspace(-2, 2, rows)[:, None]
    codes, scale = quantize_groups(x, getattr(granularity, kind))
    assert codes.dtype == torch.int8
    assert codes.shape == x.shape
    assert scale.shape == (2, rows)
    for head in range(2):
        wanted, scales = grouped_codes(x[head].double(), kind, granularity.name)
        torch.testing.assert_close(scale[head].double(), scales, rtol=1e-6, atol=0)
        difference = (codes[head].double() - wanted).abs()
        assert difference.max() <= 1
        assert difference.mean() < 1e-3


def test_codes_round_half_to_even_and_stay_within_127():
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0]])
    codes, scale = quantize_value_rows(x)
    assert scale.item() == pytest.approx(1 + 1e-7)
    assert codes[0, [0, 4]].tolist() == [127, -127]
    codes, _ = quantize_value_rows(torch.zeros(3, 64))
    assert not codes.any()


def test_a_constant_key_vanishes_and_a_mean_can_be_given():
    key = torch.randn(1, 1, 1, 64).expand(1, 1, 9, 64)
    codes, scale = quantize_key(key, Granularity.PER_WARP, key[:, :, 0])
    assert not codes.any()
    torch.testing.assert_close(scale, torch.full((1, 1, 9), 1e-7))
    shifted, _ = quantize_key(key + 3, Granularity.PER_WARP, key[:, :, 0])
    assert shifted.any()
