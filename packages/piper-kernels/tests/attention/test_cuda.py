"""Dense attention on a CUDA device: no synchronization, capture, and the results of the CPU."""

import pytest
import torch
from attention_oracle import random_operands
from process_state import no_synchronization

from piper_kernels import piper_attention, sage_attention_2pp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Of a backend against the reference on the CPU. With a mask results are larger: those of row i are
# means of i values, twice as large on average as means of all of them, and so are their errors.
MEAN_ERROR, CAUSAL_MEAN_ERROR, MAX_ERROR = 0.003, 0.006, 0.12


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128], ids=["D64", "D128"])
@pytest.mark.parametrize("operator", [piper_attention, sage_attention_2pp])
def test_no_synchronization_and_a_replay_equals_eager(operator, head_dim, is_causal):
    kv_heads = 2 if operator is piper_attention else 4
    operands = random_operands(1, 4, kv_heads, 193, 193, head_dim)
    wanted = operator(*operands, is_causal=is_causal).float()
    on_device = [x.cuda() for x in operands]
    eager = operator(*on_device, is_causal=is_causal)
    error = (eager.cpu().float() - wanted).abs()
    assert error.mean() < (CAUSAL_MEAN_ERROR if is_causal else MEAN_ERROR)
    assert error.max() < MAX_ERROR
    with no_synchronization():
        operator(*on_device, is_causal=is_causal)
    live = [torch.zeros_like(x) for x in on_device]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = operator(*live, is_causal=is_causal)
    for destination, source in zip(live, on_device, strict=True):
        destination.copy_(source)
    graph.replay()
    assert torch.equal(captured, eager)
