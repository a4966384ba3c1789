import pytest
import torch

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.sharding import shard_quantized_weight


def inner_tensors(weight):
    return {name: getattr(weight, name) for name in weight.__tensor_flatten__()[0]}


def assert_owns_storage(shard, weight):
    whole = inner_tensors(weight)
    for name, tensor in inner_tensors(shard).items():
        assert tensor.untyped_storage().data_ptr() != whole[name].untyped_storage().data_ptr()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize(
    ("dim", "start", "length"),
    [(0, 0, 1), (0, 2, 5), (0, 6, 1), (-2, 3, 4), (1, 0, 16), (1, 16, 32), (-1, 48, 16), (0, 0, 7)],
)
def test_int8_shard_is_the_slice_of_the_weight(make_weight, dim, start, length):
    weight = make_weight(rows=7, features=64, dtype=torch.bfloat16, act=torch.tensor(0.25))
    shard = shard_quantized_weight(weight, dim=dim, start=start, length=length)
    assert type(shard) is ConvRotInt8Tensor
    assert shard.group_size == 16
    assert shard.dtype == torch.bfloat16
    expected = weight.dequantize(torch.float32).narrow(dim, start, length)
    assert torch.equal(shard.dequantize(torch.float32), expected)
    assert shard.shape == expected.shape
    assert shard.stride() == (expected.shape[1], 1)
    assert torch.equal(shard.act_per_tensor_scale, weight.act_per_tensor_scale)
    assert_owns_storage(shard, weight)


def test_shards_of_shards(make_weight):
    weight = make_weight(rows=11, features=128)
    rows = shard_quantized_weight(weight, dim=0, start=3, length=7)
    both = shard_quantized_weight(rows, dim=1, start=32, length=64)
    assert torch.equal(both.dequantize(), weight.dequantize()[3:10, 32:96])


def test_writing_a_shard_leaves_the_weight_alone(make_weight):
    weight = make_weight(act=torch.tensor(1.0))
    before = weight.dequantize()
    shard = shard_quantized_weight(weight, dim=0, start=0, length=7)
    shard.qdata.zero_()
    shard.scale.zero_()
    shard.act_per_tensor_scale.zero_()
    assert torch.equal(weight.dequantize(), before)
    assert weight.act_per_tensor_scale == 1


def test_sharding_works_on_meta():
    weight = ConvRotInt8Tensor(
        torch.empty(8, 64, dtype=torch.int8, device="meta"),
        torch.empty(8, 1, device="meta"),
        64,
    )
    shard = shard_quantized_weight(weight, dim=0, start=4, length=4)
    assert shard.device.type == "meta"
    assert shard.shape == (4, 64)


@pytest.mark.parametrize(
    ("interval", "error", "match"),
    [
        ({"dim": True, "start": 0, "length": 1}, TypeError, "integers"),
        ({"dim": 0, "start": 0.0, "length": 1}, TypeError, "integers"),
        ({"dim": 0, "start": 0, "length": torch.tensor(1)}, TypeError, "integers"),
        ({"dim": 2, "start": 0, "length": 1}, IndexError, "dimension"),
        ({"dim": -3, "start": 0, "length": 1}, IndexError, "dimension"),
        ({"dim": 0, "start": -1, "length": 1}, ValueError, "nonempty"),
        ({"dim": 0, "start": 0, "length": 0}, ValueError, "nonempty"),
        ({"dim": 0, "start": 5, "length": 3}, ValueError, "within"),
        ({"dim": 1, "start": 8, "length": 16}, ValueError, "rotation group size 16"),
        ({"dim": 1, "start": 0, "length": 24}, ValueError, "align"),
    ],
)
def test_refused_intervals(make_weight, interval, error, match):
    with pytest.raises(error, match=match):
        shard_quantized_weight(make_weight(), **interval)


def test_refused_weights(make_weight):
    interval = {"dim": 0, "start": 0, "length": 1}
    with pytest.raises(TypeError, match="Piper quantized weight"):
        shard_quantized_weight(torch.randn(4, 16), **interval)
    with pytest.raises(NotImplementedError, match="transposed"):
        shard_quantized_weight(make_weight().t(), **interval)
    conv = ConvRotInt8Tensor.from_hp(torch.randn(2, 64, 3, 3, 3), group_size=64)
    with pytest.raises(NotImplementedError, match="2-D"):
        shard_quantized_weight(conv, **interval)
    strided = make_weight()
    strided.qdata = torch.zeros(32, 7, dtype=torch.int8).t()
    with pytest.raises(NotImplementedError, match="contiguous"):
        shard_quantized_weight(strided, **interval)
