import pytest
import torch

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.io import RowQuantizedWeight, quantize_int8


@pytest.mark.parametrize("rows", [1, 5, 0])
@pytest.mark.parametrize("features", [1, 23, 0])
def test_int8_codes_against_float64(rows, features):
    dense = torch.randn(rows, features)
    weight = RowQuantizedWeight.from_hp(dense)
    assert weight.qdata.dtype == torch.int8
    assert weight.shape == (rows, features)
    if features:
        scale = (dense.abs().amax(-1, keepdim=True) / 127).double()
        assert torch.equal(weight.scale.double(), scale)
    assert (weight.dequantize() - dense).abs().le(weight.scale * 0.5001).all()


def test_fp8_codes_are_the_nearest_ones():
    dense = torch.randn(6, 41) * torch.logspace(-3, 3, 6).view(-1, 1)
    weight = RowQuantizedWeight.from_hp(dense, storage_dtype=torch.float8_e4m3fn)
    assert torch.allclose(weight.scale, dense.abs().amax(-1, keepdim=True) / 448)
    levels = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    levels = levels[levels.isfinite()].unique()
    scaled = dense.double() / weight.scale.double()
    distance = (scaled.unsqueeze(-1) - levels).abs().amin(-1)
    chosen = (scaled - weight.qdata.double()).abs()
    assert (chosen <= distance * (1 + 1e-5) + 1e-9).all()
    assert weight.qdata.double().abs().amax(-1).eq(448).all()


@pytest.mark.parametrize("storage_dtype", [torch.int8, torch.float8_e4m3fn])
def test_zero_rows_stay_zero_and_finite(storage_dtype):
    dense = torch.randn(3, 8)
    dense[1] = 0
    weight = RowQuantizedWeight.from_hp(dense, storage_dtype=storage_dtype)
    assert weight.scale[1] > 0
    assert torch.equal(weight.dequantize()[1], torch.zeros(8))


def test_logical_dtype_and_moves():
    act = torch.tensor(0.5)
    weight = RowQuantizedWeight.from_hp(
        torch.randn(3, 8, dtype=torch.float16), act_per_tensor_scale=act
    )
    assert weight.dequantize().dtype == torch.float16
    assert weight.dequantize(torch.float32).dtype == torch.float32
    moved = weight.to("meta")
    assert {moved.qdata.device.type, moved.scale.device.type} == {"meta"}
    assert moved.act_per_tensor_scale.device.type == "meta"


CODES = torch.zeros(3, 8, dtype=torch.int8)
SCALE = torch.ones(3, 1)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((CODES.float(), SCALE), "qdata must be int8"),
        ((CODES[0], SCALE), "shape"),
        ((CODES, SCALE.double()), "scale must be float32"),
        ((CODES, SCALE.view(3)), r"with shape \(3, 1\)"),
        ((CODES.t(), torch.ones(8, 1)), "contiguous"),
        ((CODES, SCALE.to("meta")), "share a device"),
        ((CODES, SCALE, torch.int8), "logical dtype"),
        ((CODES, SCALE, torch.float32, torch.ones(1)), "FP32 scalar"),
    ],
)
def test_refused_storage(arguments, match):
    with pytest.raises(ValueError, match=match):
        RowQuantizedWeight(*arguments)


def test_refused_sources():
    with pytest.raises(ValueError, match="storage_dtype"):
        RowQuantizedWeight.from_hp(torch.randn(2, 4), storage_dtype=torch.uint8)
    with pytest.raises(ValueError, match="2-D"):
        RowQuantizedWeight.from_hp(torch.randn(4))
    with pytest.raises(ValueError, match="logical dtype"):
        RowQuantizedWeight.from_hp(torch.randn(2, 4).double())


def test_rotation_where_the_group_divides():
    assert type(quantize_int8(torch.randn(2, 64), group_size=64)) is ConvRotInt8Tensor
    assert type(quantize_int8(torch.randn(2, 65), group_size=64)) is RowQuantizedWeight
    conv = quantize_int8(torch.randn(2, 64, 3, 3, 3), group_size=64)
    assert type(conv) is ConvRotInt8Tensor
    with pytest.raises(ValueError, match="group size must be one of"):
        quantize_int8(torch.randn(2, 65), group_size=32)
