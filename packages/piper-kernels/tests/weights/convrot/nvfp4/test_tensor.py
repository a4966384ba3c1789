import pytest
import torch
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def dense(rows=7, features=256, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + features)
    return torch.randn(rows, features, generator=generator).to(dtype)


def test_golden():
    source = ((7 * torch.arange(64)) % 23 - 11).float().view(2, 32)
    weight = ConvRotNVFP4Tensor.from_hp(source, group_size=16, compute_per_tensor_scale=True)
    assert weight.per_tensor_scale.item() == float.fromhex("0x1.5b6db6p-8")
    assert weight.scale.view(torch.uint8).tolist() == [[124, 126], [126, 123]]
    assert [bytes(row.tolist()).hex(" ") for row in weight.qdata] == [
        "ed 4b c8 62 7d 3c 56 cf f3 14 3b c9 61 84 e5 4f",
        "c0 97 7d d5 c9 be 93 1c 7e 15 46 d9 b2 7e fd 46",
    ]
    start = [-9.6696415, -3.5624995, 3.0535710, 10.1785698, -6.1071434, 1.0178568]
    torch.testing.assert_close(weight.dequantize()[0, :6], torch.tensor(start), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group_size", [16, 64, 256])
@pytest.mark.parametrize("two_level", [False, True])
def test_from_hp_quantizes_the_rotated_weight_in_fp32(dtype, group_size, two_level):
    source = dense(dtype=dtype)
    weight = ConvRotNVFP4Tensor.from_hp(
        source, group_size=group_size, compute_per_tensor_scale=two_level, is_swizzled_scales=True
    )
    rotated = rotate_groups(source.float(), group_size)
    level = per_tensor_amax_to_scale(rotated.abs().amax()) if two_level else None
    expected = PiperNVFP4Tensor.from_hp(rotated, per_tensor_scale=level, is_swizzled_scales=True)
    assert weight.dtype == dtype
    assert torch.equal(weight.qdata, expected.qdata)
    assert torch.equal(weight.scale.view(torch.uint8), expected.scale.view(torch.uint8))
    if two_level:
        assert torch.equal(weight.per_tensor_scale, level)
    error = (weight.dequantize(torch.float32) - source.float()).norm() / source.float().norm()
    assert error < 0.12


@pytest.mark.parametrize("output_dtype", [None, *FLOATS])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dequantize_rotates_in_the_output_dtype(dtype, output_dtype):
    weight = ConvRotNVFP4Tensor.from_hp(
        dense(dtype=dtype), group_size=64, compute_per_tensor_scale=True
    )
    fields = (weight.qdata, weight.scale, 16, dtype, weight.per_tensor_scale)
    stored = PiperNVFP4Tensor(*fields).dequantize(output_dtype)
    result = weight.dequantize(output_dtype)
    assert result.dtype == (output_dtype or dtype)
    assert torch.equal(result, rotate_groups(stored, 64))
    assert torch.equal(weight.t().dequantize(output_dtype), result.t())


def test_rotation_helps_rows_with_outliers():
    source = dense(64)
    source[:, 5] *= 40
    errors = []
    for make in (
        PiperNVFP4Tensor.from_hp,
        lambda hp, **options: ConvRotNVFP4Tensor.from_hp(hp, group_size=256, **options),
    ):
        weight = make(source, compute_per_tensor_scale=True)
        residual = weight.dequantize() - source
        ordinary = torch.arange(256) != 5
        errors.append(residual[:, 1:16][:, ordinary[1:16]].norm().item())
    assert errors[1] < 0.8 * errors[0]


def test_zero_weight():
    weight = ConvRotNVFP4Tensor.from_hp(
        torch.zeros(3, 64), group_size=64, compute_per_tensor_scale=True
    )
    assert weight.per_tensor_scale.item() == 2.0**-120
    assert torch.equal(weight.dequantize(), torch.zeros(3, 64))


def test_infinities_and_both_scales_are_refused():
    source = dense()
    source[1, 2] = torch.inf
    with pytest.raises(ValueError, match="non-finite amax"):
        ConvRotNVFP4Tensor.from_hp(source, group_size=16, compute_per_tensor_scale=True)
    with pytest.raises(ValueError, match="both compute and receive"):
        ConvRotNVFP4Tensor.from_hp(
            dense(),
            group_size=16,
            compute_per_tensor_scale=True,
            per_tensor_scale=torch.tensor(1.0),
        )


def test_from_torchao_shares_storage_and_checks_the_group():
    foreign = NVFP4Tensor.to_nvfp4(rotate_groups(dense(), 64), is_swizzled_scales=True)
    weight = ConvRotNVFP4Tensor.from_torchao(foreign, group_size=64)
    assert weight.qdata is foreign.qdata
    assert weight.scale is foreign.scale
    assert weight.group_size == 64
    assert torch.equal(weight.dequantize(), rotate_groups(foreign.dequantize(), 64))
    assert ConvRotNVFP4Tensor.from_torchao(weight, group_size=64) is weight
    assert ConvRotNVFP4Tensor.from_torchao(weight) is weight
    assert PiperNVFP4Tensor.from_torchao(weight) is weight
    plain = PiperNVFP4Tensor.from_torchao(foreign)
    assert ConvRotNVFP4Tensor.from_torchao(plain, group_size=16).group_size == 16
    with pytest.raises(ValueError, match="uses group size 64, not 16"):
        ConvRotNVFP4Tensor.from_torchao(weight, group_size=16)
    with pytest.raises(TypeError, match="requires a group size"):
        ConvRotNVFP4Tensor.from_torchao(foreign)
    with pytest.raises(TypeError, match="from_torchao needs an NVFP4Tensor"):
        ConvRotNVFP4Tensor.from_torchao(torch.zeros(2, 64), group_size=64)


def test_group_size_refusals():
    with pytest.raises(TypeError, match="requires a group size"):
        ConvRotNVFP4Tensor.from_hp(dense())
    for group_size in (0, 8, 32, 512):
        with pytest.raises(ValueError, match="group size must be one of"):
            ConvRotNVFP4Tensor.from_hp(dense(), group_size=group_size)
    with pytest.raises(ValueError, match="is not divisible by group size"):
        ConvRotNVFP4Tensor.from_hp(dense(7, 48), group_size=64)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (torch.zeros(16), "must be 2-D"),
        (torch.zeros(2, 4, 16), "must be 2-D"),
        (torch.zeros(4, 16, dtype=torch.float64), "must use float16, bfloat16, or float32"),
        (torch.zeros(4, 16, device="meta"), "cannot quantize a meta tensor"),
        (torch.zeros(4, 24), "multiple of 16"),
    ],
)
def test_from_hp_refusals(source, match):
    with pytest.raises(ValueError, match=match):
        ConvRotNVFP4Tensor.from_hp(source, group_size=16)


QDATA, SCALE = torch.zeros(4, 24, dtype=torch.uint8), torch.ones(4, 3).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("qdata", "dtype", "group_size", "match"),
    [
        (QDATA, torch.float32, 24, "group size must be one of"),
        (QDATA, torch.float32, 64, "is not divisible by group size"),
        (QDATA.t(), torch.float32, 64, "is not divisible by group size"),
        (QDATA, torch.float64, 16, "logical dtype must be"),
        (QDATA.view(1, 4, 24), torch.float32, 16, "must be 2-D"),
    ],
)
def test_constructor_refusals(qdata, dtype, group_size, match):
    with pytest.raises(ValueError, match=match):
        ConvRotNVFP4Tensor(qdata, SCALE, 16, dtype, group_size)


def test_constructor_order_puts_the_group_after_the_dtype():
    weight = ConvRotNVFP4Tensor(QDATA, SCALE, 16, torch.float16, 16, None, None, False)
    assert weight.group_size == 16
    assert ConvRotNVFP4Tensor(QDATA.t(), SCALE.t(), 16, torch.float16, 16).transposed
    assert weight.tensor_attribute_names == ["block_size", "orig_dtype", "group_size"]
    with pytest.raises(TypeError, match="high_first must be bool"):
        ConvRotNVFP4Tensor(QDATA, SCALE, 16, torch.float16, 16, high_first=1)
