import hashlib

import pytest
import torch

from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.int8._quantization import dynamic_quantize_rows

FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def quantize_loop(rows):
    """Row quantization one value at a time, every step rounded to FP32."""
    codes = torch.zeros(rows.shape, dtype=torch.int8)
    scales = torch.zeros(rows.shape[0], 1)
    for r, row in enumerate(rows):
        scale = torch.maximum(row.abs().max() / torch.tensor(127.0), torch.tensor(1e-30))
        scales[r, 0] = scale
        for c, value in enumerate(row):
            codes[r, c] = max(-128, min(127, round((value / scale).item())))
    return codes, scales


def golden_weight():
    index = torch.arange(64).view(2, 32)
    return ((7 * index) % 23 - 11).to(torch.float32)


def test_golden_vector():
    weight = ConvRotInt8Tensor.from_hp(golden_weight(), group_size=16)
    assert [value.hex() for value in weight.scale.flatten().tolist()] == [
        "0x1.bb76ee0000000p-4",
        "0x1.cb972e0000000p-4",
    ]
    assert weight.qdata.tolist() == [
        [-48, -90, -25, 39, -2, -44, 21, 85, -62, 109, -39, 25, 90, 48, -99, -35,
         30, -118, 53, 12, -30, 35, -7, -48, 16, 81, 39, -2, 62, -85, -127, 44],
        [2, -38, 127, -16, -56, 109, 69, -74, -11, -51, -91, -29, 33, -7, -47, 16,
         -76, 89, 49, 9, 71, 31, -9, -49, 13, -27, -67, 98, -45, -85, 80, 40],
    ]  # fmt: skip
    digest = hashlib.sha256(weight.qdata.numpy().tobytes()).hexdigest()
    assert digest == "44618a8d3b1a2a9d32724ef9eb85acaf3bd77c623782d1f662be675f75ee2bbe"


@pytest.mark.parametrize("shape", [(1, 16), (5, 17), (7, 1)])
def test_rows_match_a_scalar_loop(shape):
    rows = torch.randn(shape) * torch.logspace(-30, 30, shape[0]).unsqueeze(1)
    codes, scale = dynamic_quantize_rows(rows)
    expected_codes, expected_scale = quantize_loop(rows)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scale, expected_scale)


def test_ties_round_to_even_and_the_input_is_kept():
    rows = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    before = rows.clone()
    codes, scale = dynamic_quantize_rows(rows)
    assert scale.item() == 1.0
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -2]]
    assert torch.equal(rows, before)


def test_zero_and_tiny_rows_stay_finite():
    rows = torch.stack([torch.zeros(16), torch.full((16,), 1e-38)])
    codes, scale = dynamic_quantize_rows(rows)
    assert torch.equal(scale, torch.full((2, 1), 1e-30))
    assert torch.equal(codes, torch.zeros(2, 16, dtype=torch.int8))


def test_zero_weight_dequantizes_to_zeros():
    weight = ConvRotInt8Tensor.from_hp(torch.zeros(64, 64), group_size=64)
    assert torch.equal(weight.dequantize(), torch.zeros(64, 64))
    assert torch.isfinite(weight.scale).all()


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 0)])
def test_empty_rows_and_columns(shape):
    codes, scale = dynamic_quantize_rows(torch.zeros(shape))
    assert codes.shape == shape
    assert torch.equal(scale, torch.full((shape[0], 1), 1e-30))


def test_stochastic_codes_are_unbiased_and_keep_the_row_maximum():
    rows = torch.full((256, 256), 0.5)
    rows[:, -1] = 1.0
    codes, scale = dynamic_quantize_rows(rows, rounding_seed=5)
    assert torch.equal(scale, torch.full((256, 1), 1 / 127))
    assert torch.equal(codes[:, -1], torch.full((256,), 127, dtype=torch.int8))
    assert set(codes[:, :-1].unique().tolist()) == {63, 64}
    assert codes[:, :-1].double().mean().item() == pytest.approx(63.5, abs=0.01)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group_size", [16, 64, 256])
def test_from_hp_rotates_and_quantizes_in_fp32(dtype, group_size):
    dense = torch.randn(7, 512).to(dtype)
    weight = ConvRotInt8Tensor.from_hp(dense, group_size=group_size)
    codes, scale = dynamic_quantize_rows(rotate_groups(dense.float(), group_size))
    assert torch.equal(weight.qdata, codes)
    assert torch.equal(weight.scale, scale)
    assert weight.dtype == dtype


@pytest.mark.parametrize("rows", [1, 384, 512, 1024])
def test_round_trip_quality_does_not_depend_on_the_row_count(rows):
    dense = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
    error = ConvRotInt8Tensor.from_hp(dense, group_size=64).dequantize() - dense
    sqnr = 10 * torch.log10(dense.square().sum() / error.square().sum())
    assert 38 < sqnr < 46


def test_outliers_do_not_overflow_half_precision():
    dense = torch.randn(4, 256).to(torch.float16)
    dense[:, 3] = 65504
    dense[:, 7] = -65504
    weight = ConvRotInt8Tensor.from_hp(dense, group_size=256)
    assert torch.isfinite(weight.scale).all()
    restored = weight.dequantize(torch.float32)
    assert (restored - dense.float()).norm() / dense.float().norm() < 0.02


def test_conv3d_rotates_channels_per_tap_and_shares_the_filter_scale():
    dense = torch.randn(5, 64, 3, 3, 3)
    weight = ConvRotInt8Tensor.from_hp(dense, group_size=16)
    taps = dense.permute(0, 2, 3, 4, 1)
    codes, scale = dynamic_quantize_rows(rotate_groups(taps, 16).reshape(5, 27 * 64))
    assert torch.equal(weight.qdata, codes.view(5, 3, 3, 3, 64))
    assert torch.equal(weight.scale, scale)
    assert weight.shape == dense.shape
    assert weight.stride() == dense.stride()
    restored = weight.dequantize()
    assert restored.is_contiguous()
    assert (restored - dense).norm() / dense.norm() < 0.02
