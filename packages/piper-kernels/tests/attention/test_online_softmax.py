import pytest
import torch

from piper_kernels.attention._online_softmax import PROBABILITY_LEVELS, OnlineSoftmax


def attend(scores, codes, scales, tiles):
    state = OnlineSoftmax.start(scores.shape[:-1], codes.shape[-1], scores.device)
    for part in torch.arange(scores.shape[-1]).chunk(tiles):
        scale = scales[part]
        factors = (scale, PROBABILITY_LEVELS)
        state.add(scores[..., part].clone(), codes[part], scale.log(), factors)
    return state.output()


@pytest.mark.parametrize("shift", [2.0**20, 2.0**30, 3.0e38])
@pytest.mark.parametrize("tiles", [1, 3])
def test_value_scales_count_beside_huge_scores(shift, tiles):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (12, 8), generator=generator)
    scales = torch.rand(12, generator=generator) + 1e-3
    scores = torch.zeros(5, 12)
    expected = (codes * scales.unsqueeze(-1)).mean(0).expand(5, 8)
    near = attend(scores, codes, scales, tiles)
    torch.testing.assert_close(near, expected, rtol=0, atol=0.6)
    # Adding one number to every score changes nothing, whatever its size.
    assert torch.equal(attend(scores + shift, codes, scales, tiles), near)


def test_a_row_without_visible_keys_keeps_its_state():
    codes, scales = torch.full((4, 2), 100), torch.ones(4)
    scores = torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]])
    assert torch.equal(attend(scores, codes, scales, 2), torch.full((1, 2), 100.0))
