import hashlib

import pytest
import torch
from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs
from torchao.prototype.mx_formats.utils import to_blocked

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
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


def make_nvfp4(rows, features, *, rotated, swizzled=True, flat=False, high_first=False):
    generator = torch.Generator().manual_seed(rows)
    dense = torch.randn(rows, features, generator=generator).to(torch.bfloat16)
    cls = ConvRotNVFP4Tensor if rotated else PiperNVFP4Tensor
    group = {"group_size": 16} if rotated else {}
    source = cls.from_hp(dense, compute_per_tensor_scale=True, is_swizzled_scales=swizzled, **group)
    return cls(
        qdata=source.qdata,
        scale=source.scale.flatten() if flat else source.scale,
        block_size=16,
        orig_dtype=torch.bfloat16,
        per_tensor_scale=source.per_tensor_scale,
        act_per_tensor_scale=torch.tensor(0.5),
        is_swizzled_scales=swizzled,
        act_quant_kwargs=QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=True),
        high_first=high_first,
        **group,
    )


LAYOUTS = {
    "swizzled": {"swizzled": True},
    "swizzled-flat": {"swizzled": True, "flat": True},
    "plain": {"swizzled": False},
    "plain-flat": {"swizzled": False, "flat": True},
    "high-first": {"high_first": True},
}


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dim", "start", "length"),
    [(0, 0, 1), (0, 130, 128), (0, 127, 2), (0, 257, 1), (0, 0, 258), (1, 16, 64), (-1, 128, 16)],
)
def test_nvfp4_shard_is_the_slice_of_the_weight(rotated, layout, dim, start, length):
    weight = make_nvfp4(258, 144, rotated=rotated, **LAYOUTS[layout])
    shard = shard_quantized_weight(weight, dim=dim, start=start, length=length)
    assert type(shard) is type(weight)
    expected = weight.dequantize(torch.float32).narrow(dim, start, length)
    assert shard.shape == expected.shape
    assert torch.equal(shard.dequantize(torch.float32), expected)
    wanted = weight.__tensor_flatten__()[1]
    assert shard.__tensor_flatten__()[1] == wanted
    for name in ("per_tensor_scale", "act_per_tensor_scale"):
        assert torch.equal(getattr(shard, name), getattr(weight, name))
    assert shard.scale.ndim == 2
    assert shard.qdata.shape == (expected.shape[0], expected.shape[1] // 2)
    assert_owns_storage(shard, weight)


def test_nvfp4_swizzled_scale_digests():
    values = (torch.arange(258 * 8) % 251).to(torch.uint8).view(258, 8)
    swizzled = to_blocked(values).view(3 * 32, 2 * 16)
    digest = hashlib.sha256(swizzled.numpy().tobytes()).hexdigest()
    assert digest.startswith("6ec2efd43545faed")
    weight = PiperNVFP4Tensor(
        qdata=torch.zeros(258, 64, dtype=torch.uint8),
        scale=swizzled.view(torch.float8_e4m3fn),
        block_size=16,
        orig_dtype=torch.float32,
        is_swizzled_scales=True,
    )
    shard = shard_quantized_weight(weight, dim=0, start=130, length=128)
    raw = shard.scale.view(torch.uint8)
    assert raw.numel() == 1024
    assert hashlib.sha256(raw.numpy().tobytes()).hexdigest().startswith("da717142ca8bfaab")


def test_nvfp4_padding_is_fresh_zeros():
    weight = make_nvfp4(130, 80, rotated=False)
    tiles = weight.scale.view(torch.uint8)
    real = torch.zeros(130, 5, dtype=torch.uint8) + 1
    tiles[to_blocked(real).view(tiles.shape) == 0] = 0x55  # garbage in the padding
    shard = shard_quantized_weight(weight, dim=0, start=1, length=3)
    used = to_blocked(torch.ones(3, 5, dtype=torch.uint8)).view(shard.scale.shape)
    assert (shard.scale.view(torch.uint8)[used == 0] == 0).all()
    assert (shard.scale.view(torch.uint8)[used == 1] != 0).all()


def test_nvfp4_shards_of_shards_and_alignment():
    weight = make_nvfp4(200, 128, rotated=True)
    rows = shard_quantized_weight(weight, dim=0, start=60, length=100)
    both = shard_quantized_weight(rows, dim=1, start=32, length=48)
    assert torch.equal(both.dequantize(), weight.dequantize()[60:160, 32:80])
    plain = make_nvfp4(8, 64, rotated=False)
    with pytest.raises(ValueError, match="align"):
        shard_quantized_weight(plain, dim=1, start=8, length=16)
    wide = ConvRotNVFP4Tensor.from_hp(torch.randn(4, 128), group_size=64)
    with pytest.raises(ValueError, match="rotation group size 64"):
        shard_quantized_weight(wide, dim=1, start=16, length=64)


def test_refused_nvfp4_weights():
    interval = {"dim": 0, "start": 0, "length": 1}
    weight = make_nvfp4(8, 64, rotated=False)
    with pytest.raises(NotImplementedError, match="transposed"):
        shard_quantized_weight(weight.t(), **interval)
    experts = PiperNVFP4Tensor.from_hp(torch.randn(2, 8, 64))
    with pytest.raises(NotImplementedError, match="2-D"):
        shard_quantized_weight(experts, **interval)
    weight.block_size = 32
    with pytest.raises(NotImplementedError, match="block size 16"):
        shard_quantized_weight(weight, **interval)
    scaled = make_nvfp4(8, 64, rotated=False)
    scaled.per_tensor_scale = torch.ones(2, 1, 1)
    with pytest.raises(NotImplementedError, match="scalar FP32 per_tensor_scale"):
        shard_quantized_weight(scaled, **interval)


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "start", "length"), [(0, 127, 2), (1, 16, 64)])
def test_shards_on_a_device_equal_those_on_the_cpu(dim, start, length):
    for weight in (
        ConvRotInt8Tensor.from_hp(torch.randn(258, 144), group_size=16),
        make_nvfp4(258, 144, rotated=True),
    ):
        local = shard_quantized_weight(weight, dim=dim, start=start, length=length)
        moved = shard_quantized_weight(weight.to("cuda"), dim=dim, start=start, length=length)
        for name, tensor in inner_tensors(moved).items():
            assert tensor.device.type == "cuda"
            expected = inner_tensors(local)[name].reshape(-1).view(torch.uint8)
            assert torch.equal(tensor.cpu().reshape(-1).view(torch.uint8), expected)
