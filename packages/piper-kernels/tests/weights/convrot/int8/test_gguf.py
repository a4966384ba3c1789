import pytest
import torch

from piper_kernels._triton import runtime
from piper_kernels._triton.row_chunks import RowChunks
from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.gguf import GGUFQuantizationType, dequantize
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor, _gguf
from piper_kernels.weights.convrot.int8._gguf_policy import TiledRows, select_conversion_plan

Q8_0 = GGUFQuantizationType.Q8_0
HOPPER = AcceleratorTarget("cuda", "sm_90")
RDNA4 = AcceleratorTarget("hip", "gfx1201")


@pytest.fixture
def packed(packed_data):
    return packed_data.finite_packed(Q8_0, 5, 64)


def convert(data, **options):
    options = {"quant_type": Q8_0, "group_size": 64, "allow_cpu": True} | options
    return ConvRotInt8Tensor.from_gguf(data, **options)


def test_fails_closed_without_an_accelerator(packed):
    reason = r"requires a supported Triton accelerator: .*got cpu.*allow_cpu=True"
    with pytest.raises(ValueError, match=reason):
        ConvRotInt8Tensor.from_gguf(packed, quant_type=Q8_0, group_size=64)
    weight = convert(packed)
    before = weight.qdata.clone()
    with pytest.raises(ValueError, match=reason):
        weight.copy_from_gguf_(packed, quant_type=Q8_0)
    assert torch.equal(weight.qdata, before)


def test_a_supported_device_uses_kernels_and_never_retries(packed, monkeypatch):
    monkeypatch.setattr(_gguf, "support", lambda device: (True, ""))
    calls = []

    def fail(*args):
        calls.append(args)
        raise RuntimeError("the kernel failed")

    monkeypatch.setattr(_gguf, "_convert_with_triton", fail)
    with pytest.raises(RuntimeError, match="the kernel failed"):
        convert(packed)
    assert len(calls) == 1


def test_the_type_may_be_an_attribute(packed):
    expected = convert(packed).qdata
    packed.quant_type = 8
    assert torch.equal(convert(packed, quant_type=None).qdata, expected)
    assert convert(packed).dtype == torch.bfloat16
    assert convert(packed, logical_dtype=torch.float16).dtype == torch.float16


def test_refill_keeps_every_identity(packed, packed_data):
    weight = convert(packed)
    qdata, scale = weight.qdata, weight.scale
    pointers, versions = (qdata.data_ptr(), scale.data_ptr()), (qdata._version, scale._version)
    other = packed_data.finite_packed(Q8_0, 5, 64, seed=1)
    result = weight.copy_from_gguf_(other, quant_type=Q8_0, allow_cpu=True)
    assert result is weight
    assert weight.qdata is qdata
    assert weight.scale is scale
    assert (qdata.data_ptr(), scale.data_ptr()) == pointers
    assert qdata._version > versions[0]
    assert scale._version > versions[1]
    fresh = convert(other)
    assert torch.equal(qdata, fresh.qdata)
    assert torch.equal(scale, fresh.scale)


def test_refill_keeps_the_input_scale(packed):
    act = torch.tensor(0.5)
    dense = dequantize(packed, Q8_0)
    weight = ConvRotInt8Tensor.from_hp(dense * 2, group_size=64, act_per_tensor_scale=act)
    weight.copy_from_gguf_(packed, quant_type=8, allow_cpu=True)
    assert weight.act_per_tensor_scale is act
    assert torch.equal(weight.qdata, convert(packed).qdata)


def test_refill_in_inference_mode(packed):
    with torch.inference_mode():
        weight = convert(packed)
        weight.copy_from_gguf_(packed, quant_type=Q8_0, allow_cpu=True)
        assert weight.qdata.is_inference()


@pytest.mark.parametrize(("rows", "features"), [(4, 64), (5, 128)])
def test_refill_of_another_shape(rows, features, packed, packed_data):
    weight = convert(packed)
    other = packed_data.finite_packed(Q8_0, rows, features)
    with pytest.raises(ValueError, match="output storage is incompatible"):
        weight.copy_from_gguf_(other, quant_type=Q8_0, allow_cpu=True)


def test_refill_of_storage_that_is_no_matrix(packed):
    weight = convert(packed)
    with pytest.raises(NotImplementedError, match="transposed"):
        weight.t().copy_from_gguf_(packed, quant_type=Q8_0, allow_cpu=True)
    conv = ConvRotInt8Tensor.from_hp(torch.randn(5, 64, 3, 3, 3), group_size=64)
    with pytest.raises(NotImplementedError, match="2-D"):
        conv.copy_from_gguf_(packed, quant_type=Q8_0, allow_cpu=True)
    weight.qdata = torch.empty(64, 5, dtype=torch.int8).t()
    with pytest.raises(ValueError, match="qdata and scale must be contiguous"):
        weight.copy_from_gguf_(packed, quant_type=Q8_0, allow_cpu=True)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"quant_type": None}, TypeError, "requires quant_type"),
        ({"quant_type": True}, TypeError, "must be an integer"),
        ({"quant_type": 9}, ValueError, "type 9 is not supported"),
        ({"quant_type": 10}, ValueError, "Q2_K.*84-byte block.*rows of 68 bytes"),
        ({"group_size": 32}, ValueError, "group size must be one of"),
        ({"group_size": 256}, ValueError, "64 is not divisible by group size 256"),
        ({"logical_dtype": torch.int8}, ValueError, "logical dtype"),
    ],
)
def test_rejected_metadata(options, error, match, packed):
    with pytest.raises(error, match=match):
        convert(packed, **options)


def test_rejected_data(packed):
    for data in (packed[0], packed.view(1, 5, -1)):
        with pytest.raises(ValueError, match=r"must be 2-D \[rows, row_bytes\]"):
            convert(data)
    with pytest.raises(ValueError, match="meta device"):
        convert(packed.to("meta"))
    with pytest.raises(TypeError, match="must be a tensor"):
        convert(packed.numpy())


@pytest.mark.parametrize(("rows", "features"), [(0, 64), (3, 0), (0, 0)])
def test_empty_weights(rows, features):
    data = torch.empty(rows, features // 32 * 34, dtype=torch.uint8)
    weight = convert(data)
    assert weight.shape == (rows, features)
    assert torch.equal(weight.scale, torch.full((rows, 1), 1e-30))
    assert weight.copy_from_gguf_(data, quant_type=Q8_0, allow_cpu=True) is weight


@pytest.mark.parametrize("target", [HOPPER, RDNA4])
def test_short_rows_are_fused(target):
    for features in (16, 48, 4096, 5376, 8192):
        plan = select_conversion_plan(target, features)
        assert isinstance(plan, RowChunks)
        assert (plan.count - 1) * plan.size < features <= plan.count * plan.size


@pytest.mark.parametrize(
    ("target", "last"), [(HOPPER, 49_152), (RDNA4, 8_192)], ids=["cuda", "hip"]
)
def test_wide_rows_are_tiled_in_a_bounded_workspace(target, last):
    assert isinstance(select_conversion_plan(target, last), RowChunks)
    for features in (last + 16, 1 << 20, 3 << 28):
        plan = select_conversion_plan(target, features)
        assert isinstance(plan, TiledRows)
        assert (plan.tiles - 1) * plan.tile < features <= plan.tiles * plan.tile
        row_bytes = 4 * plan.tiles
        assert plan.rows_per_pass * row_bytes <= max(1 << 20, row_bytes)
        assert (plan.rows_per_pass + 1) * row_bytes > 1 << 20


def test_old_devices_are_named(packed, monkeypatch):
    monkeypatch.setattr(runtime, "accelerator_target", lambda d: AcceleratorTarget("cuda", "sm_61"))
    with pytest.raises(ValueError, match=r"sm_70 or newer.*is sm_61"):
        convert(packed, allow_cpu=False)
    assert convert(packed).shape == (5, 64)
