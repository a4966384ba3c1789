"""Work on streams of its own."""

import pytest
import torch

from phyai.runtime.streams import lane, side_by_side


def test_results_keep_their_order():
    order = []

    def run(index):
        return lambda: order.append(index) or torch.tensor(index)

    found = side_by_side([run(index) for index in range(3)], torch.device("cpu"))
    assert [int(value) for value in found] == order == [0, 1, 2]
    assert side_by_side([], torch.device("cpu")) == []


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize("name", DEVICES)
def test_each_run_has_a_lane(name):
    device = torch.device(name)

    def fail():
        raise RuntimeError(f"in lane {lane()}")

    runs = [lambda: torch.tensor(lane(), device=device)] * 3
    assert [int(value) for value in side_by_side(runs, device)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="in lane 1"):
        side_by_side([runs[0], fail], device)
    assert lane() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_wait_for_each_other():
    device = torch.device("cuda")
    x = torch.zeros(1 << 20, device=device)

    def step(value):
        torch.cuda._sleep(2_000_000)
        x.fill_(value)
        torch.cuda._sleep(2_000_000)
        parts = side_by_side([lambda: x + 1, lambda: x + 2, lambda: x + 3], device)
        x.zero_()
        return sum(parts)

    for value in range(4):  # memory of the streams is used again
        assert (step(value) == 3 * value + 6).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(5)
    graph.replay()
    assert (found == 21).all()
