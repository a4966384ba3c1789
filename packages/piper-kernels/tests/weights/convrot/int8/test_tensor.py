import copy

import pytest
import torch

from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def storage(rows=8, features=32):
    generator = torch.Generator().manual_seed(rows * 1000 + features)
    codes = torch.randint(-127, 128, (rows, features), dtype=torch.int8, generator=generator)
    return codes, torch.rand(rows, 1, generator=generator) + 0.1


def make(rows=8, features=32, dtype=torch.float32, act=None):
    qdata, scale = storage(rows, features)
    return ConvRotInt8Tensor(qdata, scale, 16, dtype, act)


def test_presents_the_logical_tensor():
    weight = make(7, 32, torch.float16)
    assert weight.shape == (7, 32)
    assert weight.stride() == (32, 1)
    assert weight.dtype == torch.float16
    assert weight.group_size == 16
    assert weight.transposed is False
    assert weight.act_per_tensor_scale is None
    assert not weight.requires_grad
    assert "ConvRotInt8Tensor" in repr(weight)


def test_default_logical_dtype_is_bfloat16():
    assert ConvRotInt8Tensor(*storage(), 16).dtype == torch.bfloat16
    assert ConvRotInt8Tensor.from_quantized(*storage(), group_size=16).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("output_dtype", [None, *FLOATS])
def test_dequantize_rotates_back_and_rounds_once(dtype, output_dtype):
    weight = make(7, 32, dtype)
    expected = rotate_groups(weight.qdata.float() * weight.scale, 16).to(output_dtype or dtype)
    result = weight.dequantize(output_dtype)
    assert torch.equal(result, expected)
    assert type(result) is torch.Tensor
    assert result.is_contiguous()


def test_dequantize_refuses_other_dtypes():
    with pytest.raises(ValueError, match="logical dtype must be"):
        make().dequantize(torch.float64)


def test_from_hp_detaches():
    dense = torch.randn(8, 16, requires_grad=True)
    weight = ConvRotInt8Tensor.from_hp(dense, group_size=16)
    assert not weight.requires_grad
    assert not weight.scale.requires_grad


def test_from_hp_reads_strided_sources():
    dense = torch.randn(32, 14).t()[::2]
    weight = ConvRotInt8Tensor.from_hp(dense, group_size=16)
    contiguous = ConvRotInt8Tensor.from_hp(dense.contiguous(), group_size=16)
    assert torch.equal(weight.qdata, contiguous.qdata)
    assert weight.qdata.is_contiguous()


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (torch.zeros(16), "must be 2-D"),
        (torch.zeros(2, 2, 16), "must be 2-D"),
        (torch.zeros(4, 16, dtype=torch.float64), "must use float16, bfloat16, or float32"),
        (torch.zeros(4, 16, dtype=torch.int8), "must use float16, bfloat16, or float32"),
        (torch.zeros(4, 16).to_sparse(), "strided layout"),
        (torch.zeros(4, 16, device="meta"), "cannot quantize a meta tensor"),
        (torch.zeros(4, 24), "is not divisible by group size"),
        (torch.zeros(4, 80, 3, 3, 3), "power-of-two"),
        (torch.zeros(4, 64, 3, 3, 1), r"\[out, 3, 3, 3, in\]"),
    ],
)
def test_from_hp_refusals(source, match):
    with pytest.raises(ValueError, match=match):
        ConvRotInt8Tensor.from_hp(source, group_size=16)


@pytest.mark.parametrize("group_size", [0, 8, 32, 512])
def test_group_size_refusal(group_size):
    with pytest.raises(ValueError, match="group size must be one of"):
        ConvRotInt8Tensor.from_hp(torch.zeros(4, 512), group_size=group_size)
    with pytest.raises(ValueError, match="group size must be one of"):
        ConvRotInt8Tensor(*storage(4, 512), group_size)


QDATA, SCALE = storage()


@pytest.mark.parametrize(
    ("qdata", "scale", "match"),
    [
        (QDATA.to(torch.uint8), SCALE, "qdata must be int8"),
        (QDATA[0], SCALE, "qdata must be int8 with shape"),
        (QDATA, SCALE[:4], r"scale must be float32 with shape \(8, 1\)"),
        (QDATA, SCALE.flatten(), r"scale must be float32 with shape \(8, 1\)"),
        (QDATA, SCALE.double(), r"scale must be float32 with shape \(8, 1\)"),
        (QDATA[:, ::2], SCALE, "qdata and scale must be contiguous"),
        (QDATA, torch.ones(8, 2)[:, :1], "qdata and scale must be contiguous"),
        (QDATA, SCALE.to("meta"), "must share a device"),
        (QDATA.to_sparse(), SCALE, "strided layout"),
        (QDATA[:, :24].contiguous(), SCALE, "24 is not divisible by group size 16"),
        (torch.zeros(8, 3, 3, 2, 64, dtype=torch.int8), SCALE, r"\[out, 3, 3, 3, in\]"),
        (torch.zeros(8, 3, 3, 3, 48, dtype=torch.int8), SCALE, "power-of-two"),
    ],
)
def test_constructor_refusals(qdata, scale, match):
    with pytest.raises(ValueError, match=match):
        ConvRotInt8Tensor(qdata, scale, 16)


def test_constructor_refuses_dtype_and_transposed():
    with pytest.raises(ValueError, match="logical dtype"):
        ConvRotInt8Tensor(QDATA, SCALE, 16, torch.float64)
    with pytest.raises(TypeError, match="transposed must be bool"):
        ConvRotInt8Tensor(QDATA, SCALE, 16, torch.float32, None, 1)
    conv = torch.zeros(8, 3, 3, 3, 64, dtype=torch.int8)
    with pytest.raises(NotImplementedError, match="cannot be transposed"):
        ConvRotInt8Tensor(conv, SCALE, 16, torch.float32, None, True)


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (torch.ones(1), "FP32 scalar"),
        (torch.ones((), dtype=torch.float16), "FP32 scalar"),
        (torch.ones((), device="meta"), "share a device"),
        (torch.ones((), requires_grad=True), "must not require gradients"),
    ],
)
def test_activation_scale_refusals(act, match):
    with pytest.raises(ValueError, match=match):
        make(act=act)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_activation_scale_contents_are_not_read(value):
    assert make(act=torch.tensor(value)).act_per_tensor_scale is not None


def test_activation_scale_is_kept_by_reference_and_does_not_change_the_weight():
    act = torch.tensor(0.5)
    dense = torch.randn(8, 32)
    static = ConvRotInt8Tensor.from_hp(dense, group_size=16, act_per_tensor_scale=act)
    assert static.act_per_tensor_scale is act
    assert torch.equal(
        static.dequantize(), ConvRotInt8Tensor.from_hp(dense, group_size=16).dequantize()
    )


def test_from_quantized_aliases_contiguous_storage():
    qdata, scale = storage()
    weight = ConvRotInt8Tensor.from_quantized(qdata, scale, group_size=16)
    assert weight.qdata is qdata
    assert weight.scale is scale
    flat = ConvRotInt8Tensor.from_quantized(qdata, scale.view(-1), group_size=16)
    assert flat.scale.shape == (8, 1)
    assert flat.scale.data_ptr() == scale.data_ptr()


def test_from_quantized_copies_only_what_is_strided():
    wide, scale = storage(8, 64)
    strided = wide[:, ::2]
    weight = ConvRotInt8Tensor.from_quantized(strided, scale, group_size=16)
    assert weight.qdata.is_contiguous()
    assert torch.equal(weight.qdata, strided)
    flat = torch.rand(16)[::2]
    weight = ConvRotInt8Tensor.from_quantized(storage()[0], flat, group_size=16)
    assert torch.equal(weight.scale, flat.view(-1, 1))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 8), (8, 2), (8, 1, 1)])
def test_from_quantized_scale_shapes(shape):
    with pytest.raises(ValueError, match="from_quantized scale must have shape"):
        ConvRotInt8Tensor.from_quantized(QDATA, torch.ones(shape), group_size=16)


def test_meta_storage():
    qdata, scale = (tensor.to("meta") for tensor in storage())
    weight = ConvRotInt8Tensor.from_quantized(qdata, scale, group_size=16)
    assert weight.device.type == "meta"
    assert weight.dequantize().shape == (8, 32)


def test_storage_is_checked_again_on_use():
    weight = make()
    weight.qdata = torch.zeros(8, 64, dtype=torch.int8)[:, ::2]
    with pytest.raises(ValueError, match="qdata and scale must be contiguous"):
        weight.dequantize()


@pytest.mark.parametrize("act", [None, torch.tensor(0.25)])
def test_flatten_round_trip(act):
    weight = make(act=act)
    names, metadata = weight.__tensor_flatten__()
    assert names == ["qdata", "scale"] + (["act_per_tensor_scale"] if act is not None else [])
    assert metadata == {"group_size": 16, "dtype": torch.float32, "transposed": False}
    inner = {name: getattr(weight, name) for name in names}
    again = ConvRotInt8Tensor.__tensor_unflatten__(inner, metadata, weight.shape, weight.stride())
    assert again.qdata is weight.qdata
    assert again.act_per_tensor_scale is act
    assert again.dtype == weight.dtype


def test_deepcopy_and_clone_own_their_storage():
    weight = make(act=torch.tensor(0.5))
    for duplicate in (copy.deepcopy(weight), weight.clone()):
        assert type(duplicate) is ConvRotInt8Tensor
        assert torch.equal(duplicate.qdata, weight.qdata)
        for name in ("qdata", "scale", "act_per_tensor_scale"):
            assert getattr(duplicate, name).data_ptr() != getattr(weight, name).data_ptr()


def test_stable_hash_describes_metadata_only():
    weight = make()
    assert weight._stable_hash_for_caching() == make()._stable_hash_for_caching()
    zeroed = make()
    zeroed.qdata.zero_()
    assert weight._stable_hash_for_caching() == zeroed._stable_hash_for_caching()
    different = [
        make(9),
        make(dtype=torch.float16),
        weight.t(),
        ConvRotInt8Tensor(*storage(8, 64), 16, torch.float32),
        ConvRotInt8Tensor(*storage(8, 64), 64, torch.float32),
    ]
    assert len({w._stable_hash_for_caching() for w in [weight, *different]}) == 6


def test_static_weights_bypass_the_disk_cache():
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    with pytest.raises(BypassAOTAutogradCache, match="static input scale"):
        make(act=torch.tensor(0.5))._stable_hash_for_caching()
