import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
]


def block(x, weight):
    return functional.linear(torch.relu(x), weight) + 1


@pytest.mark.parametrize(
    ("act", "states"),
    [
        (None, ["autograd_cache_miss", "autograd_cache_hit"]),
        (torch.tensor(0.05), ["autograd_cache_bypass", "autograd_cache_bypass"]),
    ],
)
def test_inductor_matches_eager_and_only_dynamic_scales_use_the_disk_cache(
    act, states, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    weight = ConvRotInt8Tensor.from_hp(torch.randn(7, 64), group_size=16, act_per_tensor_scale=act)
    x = torch.randn(5, 64)
    for state in states:
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            compiled = torch.compile(block, fullgraph=True)
            assert torch.equal(compiled(x, weight), block(x, weight))
        assert counters["aot_autograd"][state] == 1
