"""What a recorded computation does around the recording itself, which is replayed on the CPU."""

import pytest
import torch

from phyai.dispatch.call import current_mode
from phyai.runtime.graphs import CapturedLoop


def test_new_inputs_are_read_and_results_are_kept(recorded):
    loop = CapturedLoop(lambda x, y: 2 * x + y, [torch.zeros(3), torch.zeros(3)])
    one, two = torch.arange(3.0), torch.ones(3)
    first = loop(one, two)
    second = loop(two, one)
    assert first.tolist() == [1, 3, 5]
    assert second.tolist() == [2, 3, 4]
    assert one.tolist() == [0, 1, 2]


def test_examples_are_copied(recorded):
    example = torch.zeros(2)
    loop = CapturedLoop(lambda x: x + 1, [example])
    loop(torch.ones(2))
    assert example.tolist() == [0, 0]


def test_the_function_runs_eagerly_then_in_capture_mode(recorded):
    modes = []

    def function(x):
        modes.append(current_mode().value)
        return x.clone()

    CapturedLoop(function, [torch.zeros(1)])
    assert modes == ["eager", "capture", "capture"]
    assert current_mode().value == "eager"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([torch.zeros(4)], r"torch\.float32 \[3\], got torch\.float32 \[4\]"),
        ([torch.zeros(3, dtype=torch.float64)], r"got torch\.float64 \[3\]"),
        ([], "got none"),
        ([torch.zeros(3)] * 2, r"got torch\.float32 \[3\], torch\.float32 \[3\]"),
    ],
)
def test_other_inputs_are_refused(recorded, inputs, message):
    loop = CapturedLoop(lambda x: x + 1, [torch.zeros(3)])
    with pytest.raises(ValueError, match=message):
        loop(*inputs)


@pytest.mark.parametrize("inputs", [[], [torch.zeros(1)], [torch.zeros(1, device="meta")]])
def test_a_graph_needs_a_gpu(inputs):
    with pytest.raises(ValueError, match=r"one CUDA device, got (no input|cpu|meta)"):
        CapturedLoop(lambda *tensors: tensors[0], inputs)
