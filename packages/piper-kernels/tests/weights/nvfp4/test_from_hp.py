"""Quantization of dense weights to NVFP4."""

import pytest
import torch
import torchao
from packaging.version import Version
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def dense(rows=7, features=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + features)
    return torch.randn(rows, features, generator=generator).to(dtype)


# TorchAO 0.17 divides where 0.18 multiplies by a reciprocal.
same_arithmetic = pytest.mark.skipif(
    Version(torchao.__version__) < Version("0.18"), reason="TorchAO 0.18 fixed the arithmetic"
)


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def golden_source():
    return ((7 * torch.arange(64)) % 23 - 11).float().view(2, 32) / 4


def test_golden_two_levels():
    weight = PiperNVFP4Tensor.from_hp(golden_source(), compute_per_tensor_scale=True)
    assert weight.per_tensor_scale.item() == float.fromhex("0x1.0c30c4p-10")
    assert weight.scale.view(torch.uint8).unique().tolist() == [126]
    assert [bytes(row.tolist()).hex(" ") for row in weight.qdata] == [
        "cf 73 1d e6 59 bf 74 2d e6 60 ae f5 3c d7 61 9e",
        "f5 4b d7 62 0e e6 5a cf 73 1d e6 59 bf 74 2d e6",
    ]


def test_golden_one_level_and_swizzled():
    two = PiperNVFP4Tensor.from_hp(golden_source(), compute_per_tensor_scale=True)
    one = PiperNVFP4Tensor.from_hp(golden_source())
    assert one.per_tensor_scale is None
    assert torch.equal(one.qdata, two.qdata)
    assert one.scale.view(torch.uint8).unique().tolist() == [47]
    swizzled = PiperNVFP4Tensor.from_hp(golden_source(), is_swizzled_scales=True)
    assert swizzled.scale.shape == (32, 16)
    assert as_bytes(swizzled.scale).flatten().nonzero().flatten().tolist() == [0, 1, 16, 17]


@same_arithmetic
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("rows", "features"), [(1, 16), (7, 48), (129, 80), (128, 64)])
@pytest.mark.parametrize("magnitude", [1.0, 1e-20, 1e4])
def test_bytes_equal_torchao(dtype, two_level, swizzled, rows, features, magnitude):
    source = (dense(rows, features) * magnitude).to(dtype)
    if rows > 1:  # TorchAO stores NaN scales for a weight that is zero altogether
        source[0, :16] = 0
    level = per_tensor_amax_to_scale(source.abs().amax()) if two_level else None
    options = {"per_tensor_scale": level, "is_swizzled_scales": swizzled}
    actual = PiperNVFP4Tensor.from_hp(source, **options)
    expected = NVFP4Tensor.to_nvfp4(source, **options)
    assert torch.equal(actual.qdata, expected.qdata)
    assert actual.scale.shape == expected.scale.shape
    assert torch.equal(as_bytes(actual.scale), as_bytes(expected.scale))
    for output_dtype in (None, *FLOATS):
        result = actual.dequantize(output_dtype)
        assert torch.equal(result, expected.dequantize(output_dtype))
    assert torch.equal(actual.get_hp_scales(), expected.get_hp_scales())
    computed = PiperNVFP4Tensor.from_hp(
        source, compute_per_tensor_scale=two_level, is_swizzled_scales=swizzled
    )
    assert torch.equal(computed.qdata, expected.qdata)


def test_half_sources_are_converted_first():
    source = dense(dtype=torch.float16)
    half = PiperNVFP4Tensor.from_hp(source, compute_per_tensor_scale=True)
    single = PiperNVFP4Tensor.from_hp(source.float(), compute_per_tensor_scale=True)
    assert half.dtype == torch.float16
    assert torch.equal(half.qdata, single.qdata)
    assert torch.equal(as_bytes(half.scale), as_bytes(single.scale))
    assert torch.equal(half.per_tensor_scale, single.per_tensor_scale)


def test_from_hp_reads_strided_sources_and_detaches():
    source = torch.randn(64, 14).t()[::2].requires_grad_()
    actual = PiperNVFP4Tensor.from_hp(source, compute_per_tensor_scale=True)
    expected = PiperNVFP4Tensor.from_hp(source.contiguous(), compute_per_tensor_scale=True)
    assert torch.equal(actual.qdata, expected.qdata)
    assert actual.qdata.is_contiguous()
    assert not actual.per_tensor_scale.requires_grad


@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("swizzled", [False, True])
def test_zero_weights_stay_zero_with_finite_scales(two_level, swizzled):
    weight = PiperNVFP4Tensor.from_hp(
        torch.zeros(3, 32), compute_per_tensor_scale=two_level, is_swizzled_scales=swizzled
    )
    assert weight.get_hp_scales().isfinite().all()
    assert (weight.get_hp_scales() > 0).all()
    assert torch.equal(weight.dequantize(), torch.zeros(3, 32))
    if two_level:
        assert weight.per_tensor_scale.item() == 2.0**-120


def test_tiny_amax_is_clamped():
    source = torch.zeros(2, 16)
    source[0, 0] = 1e-38
    weight = PiperNVFP4Tensor.from_hp(source, compute_per_tensor_scale=True)
    assert weight.per_tensor_scale.item() == 2.0**-120
    assert weight.dequantize().isfinite().all()


@pytest.mark.parametrize("rows", [1, 97, 128, 384, 512, 1024])
def test_quality_does_not_depend_on_the_rows(rows):
    source = dense(rows, 256)
    weight = PiperNVFP4Tensor.from_hp(source, compute_per_tensor_scale=True)
    error = (weight.dequantize() - source).norm() / source.norm()
    assert 0.08 < error < 0.11


def test_given_global_scale_is_kept_by_reference():
    level = torch.tensor(0.001)
    act = torch.tensor(0.5)
    weight = PiperNVFP4Tensor.from_hp(dense(), per_tensor_scale=level, act_per_tensor_scale=act)
    assert weight.per_tensor_scale is level
    assert weight.act_per_tensor_scale is act


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (torch.zeros(16), "must be 2-D"),
        (torch.zeros(1, 1, 1, 16), "must be 2-D"),
        (torch.zeros(4, 16, dtype=torch.float64), "must use float16, bfloat16, or float32"),
        (torch.zeros(4, 16, dtype=torch.int8), "must use float16, bfloat16, or float32"),
        (torch.zeros(4, 16).to_sparse(), "strided layout"),
        (torch.zeros(4, 16, device="meta"), "cannot quantize a meta tensor"),
        (torch.zeros(4, 24), "multiple of 16"),
        (torch.zeros(4, 0), "multiple of 16"),
    ],
)
def test_from_hp_refusals(source, match):
    with pytest.raises(ValueError, match=match):
        PiperNVFP4Tensor.from_hp(source)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"block_size": 32}, "block_size must be 16"),
        (
            {"compute_per_tensor_scale": True, "per_tensor_scale": torch.tensor(1.0)},
            "both compute and receive",
        ),
        ({"per_tensor_scale": torch.tensor(1.0).double()}, "must be float32"),
        ({"per_tensor_scale": torch.ones(1)}, "per_tensor_scale must be a scalar"),
        ({"per_tensor_scale": torch.ones(1, 1, 1)}, "per_tensor_scale must be a scalar"),
        ({"per_tensor_scale": torch.ones((), device="meta")}, "must share a device"),
    ],
)
def test_from_hp_option_refusals(options, match):
    with pytest.raises(ValueError, match=match):
        PiperNVFP4Tensor.from_hp(dense(), **options)


@pytest.mark.parametrize("shape", [(), (1, 1, 1), (3, 1, 1)])
@pytest.mark.parametrize("swizzled", [False, True])
def test_stacks_take_a_level_per_expert(shape, swizzled):
    source = torch.randn(3, 128, 48, generator=torch.Generator().manual_seed(1))
    level = torch.arange(1, 1 + max(1, *shape, 1)).float().view(shape) / 500
    weight = PiperNVFP4Tensor.from_hp(source, per_tensor_scale=level, is_swizzled_scales=swizzled)
    assert weight.per_tensor_scale is level
    for expert, own in enumerate(level.expand(3, 1, 1).flatten()):
        single = PiperNVFP4Tensor.from_hp(
            source[expert], per_tensor_scale=own, is_swizzled_scales=swizzled
        )
        assert torch.equal(weight.qdata[expert], single.qdata)
        assert torch.equal(as_bytes(weight.scale[expert]), as_bytes(single.scale))
    with pytest.raises(ValueError, match="one per expert"):
        PiperNVFP4Tensor.from_hp(source, per_tensor_scale=torch.ones(2, 1, 1))


def test_swizzled_stacks_need_whole_tiles():
    with pytest.raises(ValueError, match="multiples of 128"):
        PiperNVFP4Tensor.from_hp(torch.zeros(2, 64, 32), is_swizzled_scales=True)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_computed_scale_needs_a_finite_amax(value):
    source = dense()
    source[3, 5] = value
    with pytest.raises(ValueError, match="non-finite amax"):
        PiperNVFP4Tensor.from_hp(source, compute_per_tensor_scale=True)
    with pytest.raises(ValueError, match="meta tensor"):
        PiperNVFP4Tensor.from_hp(source.to("meta"), compute_per_tensor_scale=True)


def test_infinite_sources_saturate_without_a_global_scale():
    source = dense()
    source[3, 5], source[2, 2] = torch.inf, -torch.inf
    result = PiperNVFP4Tensor.from_hp(source).dequantize()
    assert result.isfinite().all()
    assert result[3, 5] == 2688
    assert result[2, 2] == -2688
