import numpy as np
import pytest
import torch
from reach.instructions import COLOUR_NAMES, TEMPLATES, instruction
from reach.normalisation import normalise
from reach.prompts import prompt_text, state_bins
from reach.tokenizer import MAX_LENGTH, build_tokenizer


def digitised(normalised: torch.Tensor) -> np.ndarray:
    return np.digitize(normalised.numpy(), np.linspace(-1, 1, 257)[:-1]) - 1


def test_bins_are_those_of_numpy():
    edges = torch.linspace(-1, 1, 257)
    around = torch.cat([edges, edges.nextafter(edges + 1), edges.nextafter(edges - 1)])
    values = torch.cat([around, torch.tensor([-9.0, 9.0, 1e30, -1e30, 0.5, 0.99])])
    np.testing.assert_array_equal(state_bins(values).numpy(), digitised(values))
    assert state_bins(torch.tensor([-1.0, -0.5, 0.0, 0.99, 1.0, -1.1])).tolist() == [
        *(0, 64, 128, 254, 255, -1)
    ]


def test_bins_of_a_strided_view():
    values = torch.randn(5, 8)[:, ::2]
    np.testing.assert_array_equal(state_bins(values).numpy(), digitised(values))


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_table_equals_the_tokenizer_on_the_whole_text(prompts, statistics, scale):
    tokenizer = build_tokenizer()
    generator = torch.Generator().manual_seed(11)
    pairs = [(t, c) for t in range(len(TEMPLATES)) for c in range(len(COLOUR_NAMES))]
    template, colour = (torch.tensor(column) for column in zip(*pairs, strict=True))
    state = torch.randn(len(pairs), 4, generator=generator) * scale
    tokens, mask = prompts.tokens(template, colour, state)
    bins = digitised(normalise(state, statistics.state))
    assert (bins == -1).any()
    for row, (t, c) in enumerate(pairs):
        expected = tokenizer.encode(prompt_text(instruction(t, c), bins[row].tolist())).ids
        assert tokens[row, mask[row]].tolist() == expected
        assert tokens[row].tolist() == expected + [0] * (MAX_LENGTH - len(expected))
        assert mask[row].tolist() == [i < len(expected) for i in range(MAX_LENGTH)]
