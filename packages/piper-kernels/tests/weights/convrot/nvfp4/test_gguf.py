import pytest
import torch

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.gguf import GGUFQuantizationType, dequantize
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor, _gguf

Q8_0 = GGUFQuantizationType.Q8_0


@pytest.fixture
def packed(packed_data):
    return packed_data.finite_packed(Q8_0, 5, 64)


def convert(data, **options):
    options = {"quant_type": Q8_0, "group_size": 64, "allow_cpu": True} | options
    return ConvRotNVFP4Tensor.from_gguf(data, **options)


def storage_bytes(weight):
    return weight.qdata, weight.scale.view(torch.uint8)


def test_fails_closed_without_an_accelerator(packed):
    reason = r"requires a supported Triton accelerator, a CUDA device from sm_80: .*got cpu"
    with pytest.raises(ValueError, match=reason):
        ConvRotNVFP4Tensor.from_gguf(packed, quant_type=Q8_0, group_size=64)
    weight = convert(packed)
    before = weight.qdata.clone()
    with pytest.raises(ValueError, match=f"{reason}.*allow_cpu=True"):
        weight.copy_from_gguf_(packed, quant_type=Q8_0)
    assert torch.equal(weight.qdata, before)


@pytest.mark.parametrize(
    ("architecture", "native"),
    [("sm_75", None), ("sm_80", False), ("sm_90", False), ("sm_100", True), ("sm_120", True)],
)
def test_devices_and_their_packing(architecture, native, monkeypatch):
    target = AcceleratorTarget("cuda", architecture)
    monkeypatch.setattr(_gguf, "support", lambda device: (True, ""))
    monkeypatch.setattr(_gguf, "accelerator_target", lambda device: target)
    device = torch.device("cuda", 0)
    assert _gguf._select_native(device, allow_cpu=True) is native
    if native is None:
        with pytest.raises(ValueError, match=f"cuda:0 is {architecture}"):
            _gguf._select_native(device, allow_cpu=False)


def test_hip_devices_fail_closed(monkeypatch):
    monkeypatch.setattr(_gguf, "support", lambda device: (True, ""))
    target = AcceleratorTarget("hip", "gfx1201")
    monkeypatch.setattr(_gguf, "accelerator_target", lambda device: target)
    with pytest.raises(ValueError, match="cuda:0 is gfx1201"):
        _gguf._select_native(torch.device("cuda", 0), allow_cpu=False)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("level", ["none", "given", "computed"])
def test_equals_from_hp(swizzled, level, packed_data, nan_filled_allocations):
    packed = packed_data.finite_packed(Q8_0, 131, 192)
    scaling = {
        "none": {},
        "given": {"per_tensor_scale": torch.tensor(0.01)},
        "computed": {"compute_per_tensor_scale": True},
    }[level] | {"is_swizzled_scales": swizzled}
    expected = ConvRotNVFP4Tensor.from_hp(dequantize(packed, Q8_0), group_size=64, **scaling)
    weight = convert(packed, **scaling)
    for actual, wanted in zip(storage_bytes(weight), storage_bytes(expected), strict=True):
        assert torch.equal(actual, wanted)
    if level == "given":
        assert weight.per_tensor_scale is scaling["per_tensor_scale"]
    if level == "computed":
        assert torch.equal(weight.per_tensor_scale, expected.per_tensor_scale)


def test_attributes_are_kept(packed):
    act = torch.tensor(2.0)
    weight = convert(packed, logical_dtype=torch.float16, act_per_tensor_scale=act, high_first=True)
    assert weight.dtype == torch.float16
    assert weight.act_per_tensor_scale is act
    assert weight.group_size == 64
    assert weight.high_first
    low = convert(packed)
    assert torch.equal(weight.dequantize(torch.float32), low.dequantize(torch.float32))


@pytest.mark.parametrize("swizzled", [False, True])
def test_refill_keeps_every_identity(swizzled, packed, packed_data):
    options = {"compute_per_tensor_scale": True, "is_swizzled_scales": swizzled}
    weight = convert(packed, **options)
    if swizzled:
        # The refill must clear the padding, whatever it holds.
        weight.scale.view(torch.uint8).fill_(99)
    inner = [weight.qdata, weight.scale, weight.per_tensor_scale]
    before = [(tensor.data_ptr(), tensor._version) for tensor in inner]
    other = packed_data.finite_packed(Q8_0, 5, 64, seed=1)
    result = weight.copy_from_gguf_(
        other, quant_type=Q8_0, compute_per_tensor_scale=True, allow_cpu=True
    )
    assert result is weight
    after = [weight.qdata, weight.scale, weight.per_tensor_scale]
    for old, new, (pointer, version) in zip(inner, after, before, strict=True):
        assert new is old
        assert new.data_ptr() == pointer
        assert new._version > version
    fresh = convert(other, **options)
    assert torch.equal(weight.per_tensor_scale, fresh.per_tensor_scale)
    for actual, wanted in zip(storage_bytes(weight), storage_bytes(fresh), strict=True):
        assert torch.equal(actual, wanted)


def test_refill_under_the_present_global_scale(packed):
    weight = convert(packed, per_tensor_scale=torch.tensor(0.01))
    expected = weight.qdata.clone()
    weight.qdata.zero_()
    weight.copy_from_gguf_(packed, quant_type=Q8_0, allow_cpu=True)
    assert torch.equal(weight.qdata, expected)
    assert weight.per_tensor_scale == 0.01


def test_rejected_refills(packed, packed_data):
    weight = convert(packed)
    convert_again = {"quant_type": Q8_0, "allow_cpu": True}
    with pytest.raises(ValueError, match="needs a weight with per_tensor_scale storage"):
        weight.copy_from_gguf_(packed, compute_per_tensor_scale=True, **convert_again)
    for rows, features in ((4, 64), (5, 128)):
        other = packed_data.finite_packed(Q8_0, rows, features)
        with pytest.raises(ValueError, match="output storage is incompatible"):
            weight.copy_from_gguf_(other, **convert_again)
    with pytest.raises(NotImplementedError, match="transposed"):
        weight.t().copy_from_gguf_(packed, **convert_again)
    weight.scale = weight.scale.flatten()
    with pytest.raises(ValueError, match="output storage is incompatible"):
        weight.copy_from_gguf_(packed, **convert_again)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"quant_type": None}, TypeError, "requires quant_type"),
        ({"quant_type": 10}, ValueError, "Q2_K.*84-byte block.*rows of 68 bytes"),
        ({"group_size": 32}, ValueError, "group size must be one of"),
        ({"group_size": 256}, ValueError, "64 is not divisible by group size 256"),
        ({"logical_dtype": torch.int8}, ValueError, "logical dtype"),
        ({"block_size": 32}, ValueError, "block_size must be 16, got 32"),
        ({"high_first": 1}, TypeError, "high_first must be bool"),
        ({"per_tensor_scale": torch.ones(1)}, ValueError, "FP32 scalar"),
        ({"per_tensor_scale": torch.tensor(1).double()}, ValueError, "FP32 scalar"),
        (
            {"per_tensor_scale": torch.tensor(1.0), "compute_per_tensor_scale": True},
            ValueError,
            "both compute and receive",
        ),
    ],
)
def test_rejected_metadata(options, error, match, packed):
    with pytest.raises(error, match=match):
        convert(packed, **options)


def test_empty_and_zero_weights():
    empty = convert(torch.empty(0, 68, dtype=torch.uint8), compute_per_tensor_scale=True)
    assert empty.shape == (0, 64)
    assert empty.per_tensor_scale == 2.0**-120
    zero = convert(torch.zeros(3, 68, dtype=torch.uint8), compute_per_tensor_scale=True)
    assert zero.per_tensor_scale == 2.0**-120
    assert (zero.scale.view(torch.uint8) == 8).all()
    assert zero.dequantize().abs().sum() == 0
