import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is missing")


@pytest.fixture(scope="module")
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(params=["int8", "nvfp4", "convrot-nvfp4"])
def weight(request):
    dense = torch.randn(7, 64)
    if request.param == "int8":
        return ConvRotInt8Tensor.from_hp(dense, group_size=16)
    options = {"compute_per_tensor_scale": True, "is_swizzled_scales": True}
    if request.param == "nvfp4":
        return PiperNVFP4Tensor.from_hp(dense, **options)
    return ConvRotNVFP4Tensor.from_hp(dense, group_size=16, **options)


def placements():
    from torch.distributed.tensor import Partial, Replicate, Shard

    return [
        (Replicate(), Replicate(), Replicate()),
        (Shard(0), Replicate(), Shard(1)),
        (Shard(1), Shard(1), Partial()),
    ]


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("compiled", [False, True])
def test_linear_equals_the_local_one(mesh, weight, index, compiled):
    from torch.distributed.tensor import DTensor

    of_weight, of_input, of_output = placements()[index]
    x = torch.randn(5, 64)
    linear = functional.linear
    if compiled:
        torch._dynamo.reset()  # every case is a recompilation of the same function
        linear = torch.compile(linear, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        result = linear(
            DTensor.from_local(x, mesh, [of_input], run_check=False),
            DTensor.from_local(weight, mesh, [of_weight], run_check=False),
        )
        assert result.placements == (of_output,)
        assert torch.equal(result.to_local(), functional.linear(x, weight))


@pytest.mark.parametrize("inference", [False, True])
def test_local_round_trip_aliases(mesh, weight, inference):
    from torch.distributed.tensor import DTensor, Replicate

    with torch.inference_mode(mode=inference):
        local = DTensor.from_local(weight, mesh, [Replicate()], run_check=False).to_local()
    assert type(local) is type(weight)
    assert local.__tensor_flatten__() == weight.__tensor_flatten__()
    assert local.qdata.data_ptr() == weight.qdata.data_ptr()
