import pytest
import torch

from phyai_quant import QuantConfigError, QuantScheme, TensorQuant, materialize
from phyai_quant.specs.base import AllocationRequest
from phyai_quant.specs.nvfp4 import Nvfp4Spec

E4M3 = torch.float8_e4m3fn
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def nvfp4(**fields):
    return TensorQuant("nvfp4", "block", micro_scaled=True, block_shape=(1, 16), **fields)


SPEC = Nvfp4Spec(nvfp4(), nvfp4(dynamic=True), online=True)


def loop_quantize(weight):
    """Returns the represented values, block by block in fp64 with fp32 scales."""
    level = max(weight.abs().max().item() / (448 * 6), 1e-12)
    out = torch.full(weight.shape, torch.nan, dtype=torch.float64)
    for n, row in enumerate(weight.double()):
        for block in range(len(row) // 16):
            values = row[block * 16 : block * 16 + 16]
            wanted = min(max(values.abs().max().item() / 6 / level, 2**-6), 448)
            scale = torch.tensor(wanted).to(E4M3).item() * level
            for k, value in enumerate(values.tolist()):
                code = sum(abs(value) / scale > threshold for threshold in THRESHOLDS)
                out[n, block * 16 + k] = LEVELS[code] * scale * (-1 if value < 0 else 1)
    return out


def loaded(make_layer, source, spec=SPEC):
    layer = make_layer("a.fc1")
    spec.allocate(layer, AllocationRequest(tuple(source.shape), torch.bfloat16))
    spec.load_weight(layer, "weight", source)
    spec.process_after_loading(layer)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (33, 32)], ids=str)
def test_weights_equal_the_block_by_block_reference(make_layer, shape, dtype):
    source = torch.randn(shape).mul(0.1)
    source[-1] *= 100
    if shape[0] > 1:
        source[0] = 0
    source = source.to(dtype)
    layer = loaded(make_layer, source)
    dequantized = SPEC.dequantize_weight(layer).double()
    expected = loop_quantize(source.float())
    differs = (dequantized - expected).abs() > 1e-5 * expected.abs()
    assert differs.double().mean() < 0.01  # a value on a threshold, in fp32 and in fp64
    if shape[0] > 1:
        assert torch.equal(dequantized[0], torch.zeros(shape[1]).double())


def test_tiles_hold_the_same_weight(make_layer):
    source = torch.randn(64, 37).t()[:, :48]  # strided
    linear = loaded(make_layer, source)
    tiled = Nvfp4Spec(nvfp4(), nvfp4(dynamic=True), layout="128x4", online=True)
    layer = loaded(make_layer, source, tiled)
    assert layer.weight_scale.shape == (128, 4)
    assert torch.equal(tiled.dequantize_weight(layer), SPEC.dequantize_weight(linear))


def test_legs_have_their_own_global_scale(make_layer):
    layer = make_layer("a.qkv_proj")
    SPEC.allocate(layer, AllocationRequest((9, 32), torch.float32, (4, 2, 3), ("q", "k", "v")))
    source = torch.randn(9, 32)
    source[4:6] *= 1e-3
    SPEC.load_weight(layer, "weight", source[6:], "v")
    SPEC.load_weight(layer, "weight", source[4:6], "k")
    assert SPEC.missing_parts(layer) == ["a.qkv_proj.weight[q]"]
    with pytest.raises(QuantConfigError, match=r"never loaded: a\.qkv_proj\.weight\[q\]"):
        SPEC.process_after_loading(layer)
    SPEC.load_weight(layer, "weight", source[:4], "q")
    SPEC.process_after_loading(layer)
    legs = (source[:4], source[4:6], source[6:])
    maxima = torch.stack([leg.abs().max() for leg in legs])
    torch.testing.assert_close(layer.weight_global_scale.data, maxima / 2688)
    stacked = make_layer("a.qkv_proj")
    SPEC.allocate(stacked, AllocationRequest((9, 32), torch.float32, (4, 2, 3), ("q", "k", "v")))
    SPEC.load_weight(stacked, "weight", source)
    SPEC.process_after_loading(stacked)
    assert torch.equal(SPEC.dequantize_weight(stacked), SPEC.dequantize_weight(layer))
    for rows, leg in zip((slice(0, 4), slice(4, 6), slice(6, 9)), legs, strict=True):
        alone = SPEC.dequantize_weight(loaded(make_layer, leg))
        assert torch.equal(SPEC.dequantize_weight(layer)[rows], alone)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(4, 16), r"shape \[4, 16\], the layer expects \[4, 32\]"),
        (torch.zeros(128), r"shape \[128\], the layer expects"),
        (torch.zeros(4, 32, dtype=torch.uint8), r"checkpoint weight is torch\.uint8"),
        (torch.full((4, 32), torch.inf), "holds NaN or infinite values"),
    ],
)
def test_bad_sources_name_the_layer(make_layer, value, text):
    layer = make_layer("a.fc1")
    SPEC.allocate(layer, AllocationRequest((4, 32), torch.float32))
    with pytest.raises(QuantConfigError, match=rf"a\.fc1: .*{text}"):
        SPEC.load_weight(layer, "weight", value)
    assert SPEC.missing_parts(layer) == ["a.fc1.weight"]
    with pytest.raises(QuantConfigError, match="cannot use checkpoint tensor 'weight_scale'"):
        SPEC.load_weight(layer, "weight_scale", torch.zeros(4, 2))


def test_inputs_have_run_time_scales(make_layer):
    layer = loaded(make_layer, torch.randn(4, 32))
    assert SPEC.needs_act_quant
    x = torch.randn(5, 32).bfloat16()
    fake = SPEC.fake_quantize_activation(x, layer)
    assert 0 < (fake - x).norm() / x.norm() < 0.13


def test_schemes():
    spec = materialize(QuantScheme(nvfp4(), nvfp4(dynamic=True), online=True))
    assert isinstance(spec, Nvfp4Spec)
    assert spec.online
    assert spec.tensor_names() == ("weight",)
