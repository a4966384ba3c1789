import pytest
import torch
from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

from phyai_quant import QuantConfigError, QuantScheme, TensorQuant, materialize
from phyai_quant.specs.base import AllocationRequest, LegSlice
from phyai_quant.specs.convrot_nvfp4 import ConvRotNvfp4Spec
from piper_kernels.linear.convrot.nvfp4 import convrot_nvfp4_linear
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor


def nvfp4(**fields):
    return TensorQuant("nvfp4", "block", micro_scaled=True, block_shape=(1, 16), **fields)


ACT = nvfp4(dynamic=True)


def quantized(source, group, *, swizzled=False):
    return ConvRotNVFP4Tensor.from_hp(
        source, group_size=group, compute_per_tensor_scale=True, is_swizzled_scales=swizzled
    )


def allocated(make_layer, spec, shape, widths=(), ids=(None,)):
    layer = make_layer("a.qkv_proj")
    spec.allocate(layer, AllocationRequest(shape, torch.bfloat16, widths, ids))
    return layer


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 16, 16), (7, 192, 64), (5, 512, 256)])
def test_online_weights_are_those_of_the_weight_class(make_layer, rows, columns, group, dtype):
    spec = ConvRotNvfp4Spec(nvfp4(rotation_group=group), online=True)
    layer = allocated(make_layer, spec, (rows, columns))
    source = torch.randn(rows, columns).to(dtype)
    spec.load_weight(layer, "weight", source)
    spec.process_after_loading(layer)
    whole = quantized(source, group)
    assert torch.equal(layer.weight, whole.qdata)
    assert torch.equal(layer.weight_scale.view(torch.uint8), whole.scale.view(torch.uint8))
    assert layer.weight_global_scale.item() == whole.per_tensor_scale.item()
    dequantized = spec.dequantize_weight(layer)
    close(dequantized, whole.dequantize(torch.float32))
    error = (dequantized - source.float()).norm() / source.float().norm()
    assert error < 0.13


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("name", ["weight_scale_2", "weight_global_scale"])
def test_stored_weights_with_a_global_scale_per_leg(make_layer, name, swizzled):
    spec = ConvRotNvfp4Spec(nvfp4(rotation_group=16, swizzled_scales=swizzled))
    layer = allocated(make_layer, spec, (12, 32), (7, 5), ("q", "k"))
    legs = {"k": torch.randn(5, 32) * 9, "q": torch.randn(7, 32)}
    wholes = {key: quantized(source, 16, swizzled=swizzled) for key, source in legs.items()}
    for key, whole in wholes.items():
        level = whole.per_tensor_scale
        spec.load_weight(layer, "weight", whole.qdata, key)
        spec.load_weight(layer, "weight_scale", whole.scale, key)
        spec.load_weight(layer, name, level if name == "weight_scale_2" else 1 / level, key)
    spec.process_after_loading(layer)
    expected = torch.cat([wholes[key].dequantize(torch.float32) for key in ("q", "k")])
    close(spec.dequantize_weight(layer), expected)


def test_inputs_are_those_of_the_linear(make_layer):
    spec = ConvRotNvfp4Spec(nvfp4(rotation_group=64), ACT, online=True)
    layer = allocated(make_layer, spec, (24, 128))
    source, x = torch.randn(24, 128), torch.randn(2, 3, 128)
    x[..., 5] = 100.0  # an outlier that the rotation spreads over its group
    x[0, 1] = 0
    spec.load_weight(layer, "weight", source)
    spec.process_after_loading(layer)
    assert spec.quantize_activation(x, layer).x.shape == (6, 128)
    fake = spec.fake_quantize_activation(x, layer)
    assert fake.shape == x.shape
    assert torch.equal(fake[0, 1], torch.zeros(128))
    dynamic = QuantizeTensorToNVFP4Kwargs(use_dynamic_per_tensor_scale=True)
    weight = ConvRotNVFP4Tensor.from_hp(
        source, group_size=64, compute_per_tensor_scale=True, act_quant_kwargs=dynamic
    )
    expected = convrot_nvfp4_linear(x, weight)
    product = fake @ spec.dequantize_weight(layer).t()
    unquantized = x @ spec.dequantize_weight(layer).t()
    error = (product - expected).norm()
    assert error < 0.05 * (unquantized - expected).norm()
    empty = spec.fake_quantize_activation(x[:0], layer)
    assert empty.shape == (0, 3, 128)


def test_weight_only_inputs_stay(make_layer):
    spec = ConvRotNvfp4Spec(nvfp4(rotation_group=16))
    layer = allocated(make_layer, spec, (3, 16))
    with pytest.raises(QuantConfigError, match="convrot_nvfp4_g16 is weight-only"):
        spec.quantize_activation(torch.ones(1, 16), layer)


@pytest.mark.parametrize(
    ("columns", "part", "text"),
    [
        (128, LegSlice((5, 256), 0, 128), None),
        (64, LegSlice((5, 128), 0, 32), "elements 32 to 96 of 128 do not fit .*rotation group"),
        (32, LegSlice((5, 128), 0, 32), "K = 32 is not divisible by rotation_group 64"),
        (64, LegSlice((5, 80), 0, 0), "K = 80 is not divisible by rotation_group 64"),
    ],
)
def test_slices_keep_rotation_groups_whole(make_layer, columns, part, text):
    spec = ConvRotNvfp4Spec(nvfp4(rotation_group=64), online=True)
    request = AllocationRequest((5, columns), torch.float32, slices=(part,))
    if text is None:
        spec.allocate(make_layer(), request)
        return
    with pytest.raises(QuantConfigError, match=rf"a\.o_proj: .*{text}"):
        spec.allocate(make_layer("a.o_proj"), request)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(3, 16), r"shape \[3, 16\], the layer expects \[3, 32\]"),
        (torch.zeros(3, 32, 1), r"shape \[3, 32, 1\], the layer expects"),
        (torch.full((3, 32), torch.nan), "non-finite amax"),
        (torch.zeros(3, 32, dtype=torch.int8), r"checkpoint weight is torch\.int8"),
    ],
)
def test_bad_sources_name_the_layer(make_layer, value, text):
    spec = ConvRotNvfp4Spec(nvfp4(rotation_group=16), online=True)
    layer = allocated(make_layer, spec, (3, 32))
    with pytest.raises(QuantConfigError, match=rf"a\.qkv_proj: .*{text}"):
        spec.load_weight(layer, "weight", value)


@pytest.mark.parametrize("sm", [None, 90, 120])
@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("act", [None, ACT])
def test_schemes(act, online, sm):
    scheme = QuantScheme(nvfp4(rotation_group=64), act, online=online)
    spec = materialize(scheme, sm)
    assert isinstance(spec, ConvRotNvfp4Spec)
    assert spec.spec_id == "convrot_nvfp4_g64"
    signature = spec.physical_signature
    assert (signature.format, signature.layout) == ("nvfp4", "convrot")
    fields = dict(signature.fields)
    assert fields["rotation_group"] == 64
    assert fields["activation"] == ("a16" if act is None else "nvfp4")
    assert (spec.tensor_names() == ("weight",)) is online


def test_other_schemes_are_refused():
    with pytest.raises(QuantConfigError, match="allowed: nvfp4 with a rotation_group"):
        ConvRotNvfp4Spec(nvfp4())
    fp8 = TensorQuant("fp8_e4m3", "per_tensor")
    with pytest.raises(QuantConfigError, match="no weight format stores"):
        materialize(QuantScheme(nvfp4(rotation_group=16), fp8))
