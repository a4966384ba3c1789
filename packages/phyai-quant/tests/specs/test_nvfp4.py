import pytest
import torch

from phyai_quant import QuantConfigError, TensorQuant
from phyai_quant.specs import _fp4
from phyai_quant.specs.base import PhysicalSignature
from phyai_quant.specs.nvfp4 import Nvfp4Spec
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

E4M3 = torch.float8_e4m3fn
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nvfp4(**fields):
    return TensorQuant("nvfp4", "block", micro_scaled=True, block_shape=(1, 16), **fields)


WEIGHT = nvfp4()
DYNAMIC = nvfp4(dynamic=True)
FP8 = TensorQuant("fp8_e4m3", "per_tensor")


def packed(rows, columns):
    return torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)


def block_scales(rows, columns):
    return (torch.rand(rows, columns // 16) * 30 + 0.1).to(E4M3)


def loop_dequantize(codes, scale, row_global):
    """Reads nibble by nibble; ``row_global(n, s)`` combines a block scale with the global one."""
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    out = torch.full((rows, columns), torch.nan)
    for n in range(rows):
        for k in range(columns):
            code = (codes[n, k // 2].item() >> (4 * (k % 2))) & 15
            value = LEVELS[code & 7] * (-1 if code & 8 else 1)
            out[n, k] = torch.tensor(value) * row_global(n, scale[n, k // 16].float())
    return out


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (129, 16)], ids=str)
@pytest.mark.parametrize("form", [(), (1,)], ids=str)
def test_modelopt_names(allocated, shape, form, layout):
    spec = Nvfp4Spec(WEIGHT, DYNAMIC, layout=layout)
    layer = allocated(spec, shape)
    assert layer.weight_scale.float().isnan().all()
    codes, scale, level = packed(*shape), block_scales(*shape), torch.tensor(0.0037)
    spec.load_weight(layer, "weight_scale_2", level.view(form))
    spec.load_weight(layer, "weight", codes)
    spec.load_weight(layer, "weight_scale", scale)
    spec.process_after_loading(layer)
    assert layer.weight_global_scale.tolist() == [level.item()]
    assert layer.weight_global_divisor is None
    expected = loop_dequantize(codes, scale, lambda n, s: s * level)
    assert torch.equal(spec.dequantize_weight(layer), expected)


@pytest.mark.parametrize("layout", ["linear", "128x4"])
def test_reciprocals_divide(allocated, layout):
    spec = Nvfp4Spec(WEIGHT, layout=layout)
    layer = allocated(spec, (5, 32))
    codes, scale, reciprocal = packed(5, 32), block_scales(5, 32), torch.tensor([2688 / 0.7])
    spec.load_weight(layer, "weight_packed", codes)
    spec.load_weight(layer, "weight_scale", scale.view(torch.uint8))
    spec.load_weight(layer, "weight_global_scale", reciprocal)
    spec.process_after_loading(layer)
    torch.testing.assert_close(layer.weight_global_scale, 1 / reciprocal)
    expected = loop_dequantize(codes, scale, lambda n, s: s / reciprocal[0])
    assert torch.equal(spec.dequantize_weight(layer), expected)
    inexact = loop_dequantize(codes, scale, lambda n, s: s * (1 / reciprocal[0]))
    assert not torch.equal(inexact, expected)


@pytest.mark.parametrize("layout", ["linear", "128x4"])
def test_each_leg_keeps_its_global_scale(allocated, layout):
    spec = Nvfp4Spec(WEIGHT, DYNAMIC, layout=layout)
    layer = allocated(spec, (9, 32), (4, 2, 3), ("q", "k", "v"), "a.qkv_proj")
    codes, scale = packed(9, 32), block_scales(9, 32)
    legs = {
        "v": (slice(6, 9), "weight_scale_2", 0.5, 0.1),
        "q": (slice(0, 4), "weight_global_scale", 12.5, 0.3),
        "k": (slice(4, 6), "weight_scale_2", 0.01, 0.2),
    }
    for shard, (rows, name, level, act) in legs.items():
        spec.load_weight(layer, "weight", codes[rows], shard)
        spec.load_weight(layer, "weight_scale", scale[rows], shard)
        spec.load_weight(layer, name, torch.tensor(level), shard)
        spec.load_weight(layer, "input_scale", torch.tensor(act), shard)
    spec.process_after_loading(layer)
    assert layer.weight_global_scale.tolist() == pytest.approx([0.08, 0.01, 0.5])
    assert layer.input_scale.tolist() == pytest.approx([0.3])

    def row_global(n, block):
        if n < 4:
            return block / torch.tensor(12.5)
        return block * torch.tensor(0.01 if n < 6 else 0.5)

    assert torch.equal(spec.dequantize_weight(layer), loop_dequantize(codes, scale, row_global))


@pytest.mark.parametrize("shape", [(1, 32), (5, 96)], ids=str)
def test_blocks_of_32_under_fp8_inputs(allocated, shape):
    wide = TensorQuant("nvfp4", "block", micro_scaled=True, block_shape=(1, 32))
    spec = Nvfp4Spec(wide, FP8)
    assert spec.spec_id == "nvfp4_block_32_linear"
    assert spec.physical_signature.block_shape == (1, 32)
    layer = allocated(spec, shape)
    codes = packed(*shape)
    scale = block_scales(shape[0], shape[1] // 2)
    for name, value in (("weight", codes), ("weight_scale", scale)):
        spec.load_weight(layer, name, value)
    for name in ("weight_scale_2", "input_scale"):
        spec.load_weight(layer, name, torch.tensor(0.25))
    spec.process_after_loading(layer)
    pairs = scale.view(torch.uint8).repeat_interleave(2, 1).view(E4M3)
    expected = loop_dequantize(codes, pairs, lambda n, s: s * 0.25)
    assert torch.equal(spec.dequantize_weight(layer), expected)
    for act in (None, DYNAMIC):
        with pytest.raises(QuantConfigError, match=r"allowed: block_shape \(1, 32\) with an fp8"):
            Nvfp4Spec(wide, act)


def test_a_natively_fused_checkpoint_fills_all_legs(allocated):
    spec = Nvfp4Spec(WEIGHT)
    layer = allocated(spec, (5, 16), (2, 3), (0, 1), "a.gate_up_proj")
    codes, scale = packed(5, 16), block_scales(5, 16)
    for name, value in (("weight", codes), ("weight_scale", scale)):
        spec.load_weight(layer, name, value)
    spec.load_weight(layer, "weight_scale_2", torch.tensor(0.25))
    spec.process_after_loading(layer)
    expected = loop_dequantize(codes, scale, lambda n, s: s * 0.25)
    assert torch.equal(spec.dequantize_weight(layer), expected)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (300, 9)], ids=str)
def test_tiles_of_block_scales(shape):
    scale = torch.randint(1, 256, shape, dtype=torch.uint8)
    tiles = _fp4.swizzle(scale)
    rows, columns = -(-shape[0] // 128) * 128, -(-shape[1] // 4) * 4
    assert tiles.shape == (rows, columns)
    flat, count = tiles.flatten(), 0
    for r in range(0, shape[0], 7):
        for c in range(shape[1]):
            tile = (r // 128) * (columns // 4) + c // 4
            byte = tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
            assert flat[byte] == scale[r, c]
            count += 1
    assert (flat == 0).sum() == flat.numel() - scale.numel()
    for form in _fp4.swizzled_shapes(*shape):
        assert torch.equal(_fp4.unswizzle(tiles.reshape(form), *shape), scale)
    assert torch.equal(_fp4.unswizzle(tiles.t().contiguous().t(), *shape), scale)


@pytest.mark.parametrize("shape", [(40, 96), (128, 64)], ids=str)
def test_checkpoints_with_tiles(allocated, shape):
    whole = PiperNVFP4Tensor.from_hp(
        torch.randn(shape), compute_per_tensor_scale=True, is_swizzled_scales=True
    )
    spec = Nvfp4Spec(nvfp4(swizzled_scales=True))
    layer = allocated(spec, shape, (24, shape[0] - 24), (0, 1))
    spec.load_weight(layer, "weight", whole.qdata)
    spec.load_weight(layer, "weight_scale", whole.scale)
    spec.load_weight(layer, "weight_scale_2", whole.per_tensor_scale)
    spec.process_after_loading(layer)
    assert torch.equal(spec.dequantize_weight(layer), whole.dequantize(torch.float32))
    layer = allocated(spec, shape)
    plain = torch.zeros(shape[0], shape[1] // 16 + 1).to(E4M3)
    with pytest.raises(QuantConfigError, match=r"a\.down_proj: .*expects swizzled scales: \[128"):
        spec.load_weight(layer, "weight_scale", plain)


@pytest.mark.parametrize("act", [DYNAMIC, nvfp4(), FP8], ids=TensorQuant.describe)
def test_input_scales(allocated, act):
    spec = Nvfp4Spec(WEIGHT, act)
    layer = allocated(spec, (4, 32), (2, 2), (0, 1), "a.gate_up_proj")
    for shard in (0, 1):
        spec.load_weight(layer, "weight", packed(2, 32), shard)
        spec.load_weight(layer, "weight_scale", block_scales(2, 32), shard)
        spec.load_weight(layer, "weight_scale_2", torch.tensor(1.0), shard)
    if act.dynamic:
        spec.process_after_loading(layer)
        assert layer.input_scale is None
    else:
        assert spec.missing_parts(layer) == [
            "a.gate_up_proj.input_scale[0]",
            "a.gate_up_proj.input_scale[1]",
        ]
        spec.load_weight(layer, "input_scale", torch.tensor(0.2), 0)
        spec.load_weight(layer, "input_scale", torch.tensor(0.1), 1)
        spec.process_after_loading(layer)
        assert layer.input_scale.tolist() == pytest.approx([0.2])
    x = torch.randn(3, 2, 32)
    view = spec.quantize_activation(x, layer)
    assert view.x.shape == (6, 32)
    fake = spec.fake_quantize_activation(x, layer)
    assert fake.shape == x.shape
    error = (fake - x).norm() / x.norm()
    assert 0 < error < (0.04 if act == FP8 else 0.13)


def test_a_stored_global_input_scale_is_used_by_every_call(allocated):
    spec = Nvfp4Spec(WEIGHT, DYNAMIC)
    layer = allocated(spec, (2, 32))
    spec.load_weight(layer, "weight_packed", packed(2, 32))
    spec.load_weight(layer, "weight_scale", block_scales(2, 32))
    spec.load_weight(layer, "weight_global_scale", torch.tensor([10.0]))
    spec.load_weight(layer, "input_global_scale", torch.tensor([400.0]))
    spec.process_after_loading(layer)
    assert layer.input_scale.item() == pytest.approx(1 / 400)
    x = torch.randn(4, 32)
    x[3] *= 1e3  # would move a run-time global scale
    together = spec.fake_quantize_activation(x, layer)
    alone = spec.fake_quantize_activation(x[:3], layer)
    assert torch.equal(together[:3], alone)


def test_zero_weights_have_extreme_global_scales(allocated):
    for name, level in (("weight_scale_2", 0.0), ("weight_global_scale", torch.inf)):
        spec = Nvfp4Spec(WEIGHT)
        layer = allocated(spec, (4, 32))
        spec.load_weight(layer, "weight", packed(4, 32))
        spec.load_weight(layer, "weight_scale", block_scales(4, 32))
        spec.load_weight(layer, name, torch.tensor(level))
        spec.process_after_loading(layer)
        assert torch.equal(spec.dequantize_weight(layer).abs(), torch.zeros(4, 32))


def test_names_signature_and_processing_twice(allocated):
    spec = Nvfp4Spec(WEIGHT, DYNAMIC, layout="128x4")
    assert spec.spec_id == "nvfp4_block_16_128x4"
    assert spec.physical_signature == PhysicalSignature(
        "nvfp4",
        layout="128x4",
        block_shape=(1, 16),
        scale_dtype="fp8_e4m3",
        granularity="block",
        storage_dtype="uint8",
        fields=(
            ("activation", "nvfp4"),
            ("input_granularity", "block"),
            ("input_scale", "dynamic"),
            ("block_size", 16),
            ("micro_scaled", True),
            ("global_scale_dtype", "fp32"),
        ),
    )
    names = ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale")
    assert Nvfp4Spec(WEIGHT).tensor_names() == names
    assert spec.tensor_names() == (*names, "input_scale", "input_global_scale")
    assert Nvfp4Spec(WEIGHT, FP8).tensor_names() == (*names, "input_scale")
    layer = allocated(spec, (4, 32))
    spec.load_weight(layer, "weight", packed(4, 32))
    spec.load_weight(layer, "weight_scale", block_scales(4, 32))
    spec.load_weight(layer, "weight_scale_2", torch.tensor(0.5))
    spec.process_after_loading(layer)
    scale, before = layer.weight_scale, spec.dequantize_weight(layer)
    assert scale.shape == (128, 4)
    spec.process_after_loading(layer)
    assert layer.weight_scale is scale
    assert torch.equal(spec.dequantize_weight(layer), before)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
