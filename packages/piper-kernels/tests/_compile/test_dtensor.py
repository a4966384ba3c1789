"""Networks of distributed tensors: the row views of their linears do not hide them."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

from piper_kernels.fusions.convrot_int8_swiglu_ffn import convrot_int8_swiglu_ffn_compile_options
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor


@pytest.fixture
def mesh(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def block(x, gate, value, down):
    hidden = functional.silu(functional.linear(x, gate)) * functional.linear(x, value)
    return functional.linear(hidden, down)


def test_a_distributed_network_is_fused(graph_capture, mesh):
    def place(tensor):
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)

    generator = torch.Generator().manual_seed(1)
    local = [
        ConvRotInt8Tensor.from_hp(
            (torch.randn(*shape, generator=generator) / 8).bfloat16(), group_size=16
        )
        for shape in ((64, 32), (64, 32), (32, 64))
    ]
    x = torch.randn(2, 9, 32, generator=generator).bfloat16()
    options = convrot_int8_swiglu_ffn_compile_options()
    actual, capture = graph_capture.run(
        block, place(x), *(place(weight) for weight in local), options=options
    )
    assert capture.targets == ["convrot_int8_swiglu_ffn"]
    with torch.no_grad():
        expected = block(x, *local)
    assert graph_capture.relative_error(actual.to_local(), expected) < 0.02
