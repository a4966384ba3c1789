import importlib.util
from types import SimpleNamespace

import pytest
import torch

from phyai_quant import QuantConfigError, QuantScheme, TensorQuant
from phyai_quant.specs import _packing, _rtn, humming, humming_checkpoint, humming_pack
from phyai_quant.specs.base import AllocationRequest, LegSlice

SCHEMES = {
    "int4": QuantScheme(TensorQuant("int4", "block", block_shape=(1, 32))),
    "int8": QuantScheme(TensorQuant("int8", "per_channel")),
    "nvfp4": QuantScheme(TensorQuant("nvfp4", "block", micro_scaled=True, block_shape=(1, 16))),
    "mxfp4": QuantScheme(TensorQuant("mxfp4", "block", micro_scaled=True, block_shape=(1, 32))),
}
every_scheme = pytest.mark.parametrize("name", SCHEMES)


@pytest.fixture
def build(monkeypatch):
    """Builds as on a GPU with the library."""
    found = importlib.util.find_spec("json")
    monkeypatch.setattr(humming_checkpoint, "find_spec", lambda name: found)
    return humming_checkpoint.build


@pytest.fixture
def packed(monkeypatch):
    """Replaces packing by keeping the raw tensors."""
    calls = []

    def pack(layer, stored, raw, device):
        calls.append(raw)
        return SimpleNamespace(), raw

    monkeypatch.setattr(humming_pack, "pack", pack)
    return calls


def tensors_of(scheme, rows, columns, seed=0):
    """Returns a quantized leg as a checkpoint stores it, and its values."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 2.0**seed
    quant = scheme.weight
    result = _rtn.quantize(weight, quant, scale_dtype=torch.bfloat16)
    values = _rtn.dequantize(result, quant)
    if quant.dtype in _rtn.INT_BITS:
        bits = _rtn.INT_BITS[quant.dtype]
        words = _packing.pack_words(_packing.to_unsigned(result.codes, bits), bits)
        scale = result.scale.reshape(rows, -1)
        return {"weight_packed": words, "weight_scale": scale}, values
    tensors = {"weight_packed": _packing.pack_nibbles(result.codes), "weight_scale": result.scale}
    if result.global_scale is not None:
        tensors["weight_scale_2"] = result.global_scale
    return tensors, values


def load(layer, spec, request, legs):
    spec.allocate(layer, request)
    for shard_id, tensors in legs.items():
        for name, tensor in tensors.items():
            spec.load_weight(layer, name, tensor, shard_id)
    spec.process_after_loading(layer)


def values_of(raw, spec):
    """Reads raw tensors back, a second scale per row included."""
    second = raw.get("weight_scale_2", torch.ones(1)).float().reshape(-1, 1)
    first = {key: tensor for key, tensor in raw.items() if key != "weight_scale_2"}
    layer = SimpleNamespace(**first)
    return humming.dequantize_raw(layer, spec.stored) * second


@every_scheme
def test_codes_and_scales_are_packed_as_they_are(name, build, packed, make_layer):
    spec = build(SCHEMES[name], 90)
    tensors, values = tensors_of(SCHEMES[name], 64, 64)
    layer = make_layer()
    load(layer, spec, AllocationRequest((64, 64), torch.bfloat16), {None: tensors})
    torch.testing.assert_close(values_of(packed[0], spec), values, rtol=1e-6, atol=0)
    assert packed[0]["weight"].dtype is torch.int32
    assert packed[0]["weight_scale"].dtype is spec.stored.scale_dtype(torch.bfloat16)
    assert packed[0]["weight_scale"].shape == spec.stored.scale_shape(64, 64)
    assert layer.humming_config is not None
    assert layer.weight.loader_preserves_dtype
    with pytest.raises(QuantConfigError, match="cannot be read back"):
        spec.dequantize_weight(layer)
    with pytest.raises(QuantConfigError, match="packed already"):
        spec.load_weight(layer, "weight_packed", tensors["weight_packed"])
    spec.process_after_loading(layer)
    assert len(packed) == 1


@every_scheme
def test_fused_legs_keep_their_own_scales(name, build, packed, make_layer):
    spec = build(SCHEMES[name], 90)
    made = {leg: tensors_of(SCHEMES[name], 64, 64, seed) for seed, leg in enumerate("qkv")}
    request = AllocationRequest((192, 64), torch.bfloat16, (64, 64, 64), ("q", "k", "v"))
    load(make_layer(), spec, request, {leg: tensors for leg, (tensors, _) in made.items()})
    expected = torch.cat([values for _, values in made.values()])
    # a second scale per row is held in bf16
    torch.testing.assert_close(values_of(packed[0], spec), expected, rtol=2**-8, atol=0)
    second = packed[0].get("weight_scale_2")
    assert (second is not None) is (name == "nvfp4")
    if second is not None:
        assert second.shape == (192,)
        assert second.dtype is torch.bfloat16


def test_equal_global_scales_stay_one_fp32_scale(build, packed, make_layer):
    tensors, values = tensors_of(SCHEMES["nvfp4"], 64, 64)
    request = AllocationRequest((128, 64), torch.bfloat16, (64, 64), (0, 1))
    spec = build(SCHEMES["nvfp4"], 90)
    load(make_layer(), spec, request, {0: tensors, 1: tensors})
    assert packed[0]["weight_scale_2"].shape == (1,)
    assert packed[0]["weight_scale_2"].dtype is torch.float32
    torch.testing.assert_close(
        values_of(packed[0], spec), torch.cat([values, values]), rtol=1e-6, atol=0
    )


@every_scheme
@pytest.mark.parametrize("split", ["N", "K"])
def test_two_ranks_pack_the_halves_of_one(name, split, build, packed, make_layer):
    spec = build(SCHEMES[name], 90)
    tensors, values = tensors_of(SCHEMES[name], 128, 128)
    part = {"N": (64, 128), "K": (128, 64)}[split]
    for rank in range(2):
        start = {"N": (64 * rank, 0), "K": (0, 64 * rank)}[split]
        request = AllocationRequest(part, torch.bfloat16, slices=(LegSlice((128, 128), *start),))
        load(make_layer(), spec, request, {None: tensors})
    halves = torch.cat([values_of(raw, spec) for raw in packed], "NK".index(split))
    torch.testing.assert_close(halves, values, rtol=1e-6, atol=0)


@every_scheme
def test_nothing_is_allocated_on_the_layer_while_loading(name, build, make_layer):
    spec = build(SCHEMES[name], 90)
    layer = make_layer()
    spec.allocate(layer, AllocationRequest((64, 64), torch.bfloat16))
    assert [(key, tensor.numel()) for key, tensor in layer.named_parameters()] == [("weight", 0)]
    assert spec.missing_parts(layer)
    with pytest.raises(QuantConfigError, match="never loaded: model"):
        spec.process_after_loading(layer)
    with pytest.raises(QuantConfigError, match="process_after_loading before"):
        spec.dequantize_weight(layer)
    with pytest.raises(QuantConfigError, match="cannot use checkpoint tensor 'bias'"):
        spec.load_weight(layer, "bias", torch.ones(64))


@every_scheme
@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((7, 64), torch.bfloat16, "N = 7 is not a multiple of 64"),
        ((64, 64), torch.float32, "params_dtype is torch.float32"),
    ],
    ids=str,
)
def test_layers_without_a_kernel_keep_the_portable_format(
    name, shape, dtype, reason, build, make_layer
):
    spec = build(SCHEMES[name], 90)
    tensors, values = tensors_of(SCHEMES[name], *shape)
    layer = make_layer()
    layer.spec = spec
    load(layer, spec, AllocationRequest(shape, dtype), {None: tensors})
    assert layer.spec is spec.portable
    assert layer.humming_refusal.startswith(reason)
    assert not hasattr(layer, "humming_config")
    torch.testing.assert_close(layer.spec.dequantize_weight(layer), values, rtol=1e-6, atol=0)
    assert torch.equal(spec.dequantize_weight(layer), layer.spec.dequantize_weight(layer))
    assert layer.state_dict()
    assert "humming_staging" not in vars(layer)


def test_a_layer_that_is_not_on_the_gpu_keeps_the_portable_format(build, make_layer):
    spec = build(SCHEMES["int4"], 90)
    tensors, values = tensors_of(SCHEMES["int4"], 64, 64)
    layer = make_layer()
    load(layer, spec, AllocationRequest((64, 64), torch.bfloat16), {None: tensors})
    assert torch.equal(spec.dequantize_weight(layer), values)
    assert "on an NVIDIA GPU, but the layer is on cpu" in layer.humming_refusal


def test_scales_beyond_fp16_keep_the_portable_format(build, packed, make_layer):
    spec = build(SCHEMES["int8"], 90)
    tensors, _ = tensors_of(SCHEMES["int8"], 64, 64)
    tensors["weight_scale"] = torch.full((64, 1), 1e6)
    layer = make_layer()
    load(layer, spec, AllocationRequest((64, 64), torch.float16), {None: tensors})
    assert not packed
    assert spec.dequantize_weight(layer).abs().max() == 128e6


@pytest.mark.parametrize(
    "scheme",
    [
        QuantScheme(TensorQuant("int4", "block", block_shape=(1, 8))),
        QuantScheme(TensorQuant("int4", "block", block_shape=(1, 48))),
        QuantScheme(TensorQuant("int4", "block", block_shape=(1, 32), symmetric=False)),
        QuantScheme(TensorQuant("int4", "block", block_shape=(1, 32), act_order=True)),
        QuantScheme(TensorQuant("int8", "per_tensor")),
        QuantScheme(
            TensorQuant("int8", "per_channel"), TensorQuant("int8", "per_channel", dynamic=True)
        ),
        QuantScheme(TensorQuant("fp8_e4m3", "per_channel")),
        QuantScheme(TensorQuant("int4", "block", block_shape=(1, 32)), online=True),
    ],
    ids=lambda scheme: scheme.describe(),
)
def test_other_checkpoints_are_left_to_other_formats(scheme, build):
    assert build(scheme, 90) is None


def test_only_a_gpu_with_the_library_packs(build, monkeypatch):
    assert build(SCHEMES["int4"], None) is None
    assert build(SCHEMES["int4"], 75) is None
    assert build(None, 90) is None
    assert build(SCHEMES["int4"], 80).physical_signature.layout == "humming"
    monkeypatch.setattr(humming_checkpoint, "find_spec", lambda name: None)
    assert build(SCHEMES["int4"], 90) is None
