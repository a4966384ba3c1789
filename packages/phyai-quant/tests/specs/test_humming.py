import pytest
import torch

from phyai_quant import QuantConfigError, QuantScheme, TensorQuant, materialize
from phyai_quant.specs import _rtn, humming_staging
from phyai_quant.specs.base import AllocationRequest, LegSlice
from phyai_quant.specs.humming import HummingSpec


def token(dtype: str) -> TensorQuant:
    return TensorQuant(dtype, "per_channel", dynamic=True)


def grouped(dtype: str, shape: tuple[int, int] = (1, 32)) -> TensorQuant:
    return TensorQuant(dtype, "block", block_shape=shape, micro_scaled=dtype in ("nvfp4", "mxfp4"))


def channel(dtype: str) -> TensorQuant:
    return TensorQuant(dtype, "per_channel")


SCHEMES = {
    "w4a16": QuantScheme(grouped("int4"), None, online=True),
    "w8a16": QuantScheme(grouped("int8"), None, online=True),
    "w4a8_int8": QuantScheme(grouped("int4"), token("int8"), online=True),
    "w4a8_fp8_e4m3": QuantScheme(grouped("int4"), token("fp8_e4m3"), online=True),
    "w8a8_int8": QuantScheme(grouped("int8"), token("int8"), online=True),
    "fp8_e4m3_a16": QuantScheme(channel("fp8_e4m3"), None, online=True),
    "fp8_e4m3_a8": QuantScheme(channel("fp8_e4m3"), token("fp8_e4m3"), online=True),
    "fp8_e4m3_block_a8": QuantScheme(grouped("fp8_e4m3", (64, 32)), token("fp8_e4m3"), online=True),
    "fp8_e5m2_a16": QuantScheme(channel("fp8_e5m2"), None, online=True),
    "fp8_e5m2_a8": QuantScheme(channel("fp8_e5m2"), token("fp8_e5m2"), online=True),
    "fp8_e5m2_block_a8": QuantScheme(grouped("fp8_e5m2", (64, 32)), token("fp8_e5m2"), online=True),
    "mxfp4_a16": QuantScheme(grouped("mxfp4"), None, online=True),
    "nvfp4_a16": QuantScheme(grouped("nvfp4", (1, 16)), None, online=True),
}


def fused_request(
    dtype: torch.dtype = torch.bfloat16, widths: tuple[int, ...] = (128, 64, 64), columns: int = 64
) -> AllocationRequest:
    return AllocationRequest(
        (sum(widths), columns), dtype, widths, ("q", "k", "v")[: len(widths)] or (None,)
    )


def rank_request(
    rank: int, rows: int, columns: int, *, split: str, dtype: torch.dtype = torch.bfloat16
) -> AllocationRequest:
    """Returns half of an unfused layer ``[rows, columns]``, cut along N or K."""
    part = {"N": (rows // 2, columns), "K": (rows, columns // 2)}[split]
    starts = {"N": (rank * part[0], 0), "K": (0, rank * part[1])}[split]
    return AllocationRequest(part, dtype, slices=(LegSlice((rows, columns), *starts),))


SCHEMES["w8a16_tensor"] = QuantScheme(TensorQuant("int8", "per_tensor"), online=True)
every_scheme = pytest.mark.parametrize("name", SCHEMES)


def source(rows, columns, seed=0, dtype=torch.bfloat16):
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    values[0] = 0
    values[-1] *= 100
    return values.to(dtype)


def loaded_layer(make_layer, spec, request, legs):
    layer = make_layer()
    spec.allocate(layer, request)
    for shard_id, weight in legs.items():
        spec.load_weight(layer, "weight", weight, shard_id)
    spec.process_after_loading(layer)
    return layer


def expected_of(weight, scheme, dtype=torch.bfloat16):
    """Quantizes a whole weight at once and reads it back."""
    quant = scheme.weight
    coarse = quant.granularity == "per_tensor" or (quant.block_shape or (1, 1))[0] > 1
    scale_dtype = torch.float32 if coarse or quant.micro_scaled else dtype
    return _rtn.dequantize(_rtn.quantize(weight, quant, scale_dtype=scale_dtype), quant)


@every_scheme
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_raw_weights_are_the_rounded_source(name, dtype, make_layer):
    spec = materialize(SCHEMES[name])
    weight = source(128, 64, dtype=dtype)
    layer = loaded_layer(make_layer, spec, AllocationRequest((128, 64), dtype), {None: weight})
    restored = spec.dequantize_weight(layer)
    assert torch.equal(restored, expected_of(weight, SCHEMES[name], dtype))
    error = (restored - weight.float()).norm() / weight.float().norm()
    assert error < {"int4": 0.15, "mxfp4": 0.2, "nvfp4": 0.2}.get(SCHEMES[name].weight.dtype, 0.08)
    assert layer.weight.dtype is torch.int32
    assert layer.weight.shape == (128, 64 * spec.stored.bits // 32)


@every_scheme
def test_fused_legs_arrive_in_any_order(name, make_layer):
    spec = materialize(SCHEMES[name])
    legs = {"v": source(64, 64, 1), "q": source(128, 64, 2), "k": source(64, 64, 3)}
    layer = loaded_layer(make_layer, spec, fused_request(), legs)
    whole = torch.cat([legs[leg] for leg in "qkv"])
    assert torch.equal(spec.dequantize_weight(layer), expected_of(whole, SCHEMES[name]))
    stacked = loaded_layer(make_layer, spec, fused_request(), {None: whole})
    assert torch.equal(spec.dequantize_weight(stacked), spec.dequantize_weight(layer))


def test_a_scale_per_tensor_spans_all_legs(make_layer):
    scheme = QuantScheme(TensorQuant("int8", "per_tensor"), online=True)
    legs = {"q": torch.full((128, 64), 2.0), "k": torch.full((64, 64), -8.0)}
    request = fused_request(widths=(128, 64))
    layer = loaded_layer(make_layer, materialize(scheme), request, legs)
    assert layer.weight_scale.tolist() == [8 / 128]
    assert layer.weight_scale.dtype is torch.float32


def test_legs_of_mixed_precision_are_quantized_in_the_wider_one(make_layer):
    scheme = SCHEMES["nvfp4_a16"]
    legs = {"q": source(128, 64), "k": source(64, 64, 1, torch.float32)}
    request = fused_request(widths=(128, 64))
    layer = loaded_layer(make_layer, materialize(scheme), request, legs)
    whole = torch.cat([legs["q"].float(), legs["k"]])
    restored = materialize(scheme).dequantize_weight(layer)
    assert torch.equal(restored, expected_of(whole, scheme))


@every_scheme
@pytest.mark.parametrize("split", ["N", "K"])
def test_two_ranks_hold_the_halves_of_one(name, split, make_layer):
    spec = materialize(SCHEMES[name])
    weight = source(256, 128)
    whole = loaded_layer(
        make_layer, spec, AllocationRequest((256, 128), torch.bfloat16), {None: weight}
    )
    parts = [
        spec.dequantize_weight(
            loaded_layer(
                make_layer, spec, rank_request(rank, 256, 128, split=split), {None: weight}
            )
        )
        for rank in range(2)
    ]
    joined = torch.cat(parts, dim="NK".index(split))
    assert torch.equal(joined, spec.dequantize_weight(whole))


@every_scheme
def test_nothing_is_allocated_on_the_layer_while_loading(name, make_layer):
    spec = materialize(SCHEMES[name])
    layer = make_layer()
    spec.allocate(layer, fused_request())
    assert [(key, tensor.numel()) for key, tensor in layer.named_parameters()] == [("weight", 0)]
    assert layer.weight.loader_preserves_dtype
    assert layer.weight.dtype is torch.int32
    assert layer.logical_shape == (256, 64)
    layer.weight.hf_keys = ["a"]
    for leg, rows in (("q", 128), ("k", 64), ("v", 64)):
        spec.load_weight(layer, "weight", source(rows, 64), leg)
        assert layer.weight.numel() == 0
        assert spec.missing_parts(layer) or leg == "v"
    assert not layer.humming_staging.pending
    spec.process_after_loading(layer)
    assert not hasattr(layer, "humming_staging")
    assert layer.weight.hf_keys == ["a"]
    assert layer.weight.loader_preserves_dtype
    spec.process_after_loading(layer)


def test_strided_sources_and_caller_buffers_are_copied(make_layer):
    spec = materialize(SCHEMES["nvfp4_a16"])
    layer = make_layer()
    spec.allocate(layer, fused_request(widths=(64, 64), columns=32))
    buffer = source(32, 128)
    expected = expected_of(buffer.t().contiguous(), SCHEMES["nvfp4_a16"])
    spec.load_weight(layer, "weight", buffer.t()[:64], "q")
    second = buffer.t()[64:].clone()
    buffer.fill_(torch.nan)
    spec.load_weight(layer, "weight", second, "k")
    spec.process_after_loading(layer)
    assert torch.equal(spec.dequantize_weight(layer), expected)


@every_scheme
def test_a_weight_in_many_chunks_is_the_weight_in_one(name, make_layer, monkeypatch):
    spec = materialize(SCHEMES[name])
    weight, request = source(192, 64), AllocationRequest((192, 64), torch.bfloat16)
    whole = loaded_layer(make_layer, spec, request, {None: weight})
    monkeypatch.setattr(humming_staging, "_CHUNK_ELEMENTS", 5 * 64)
    chunked = loaded_layer(make_layer, spec, request, {None: weight})
    assert torch.equal(spec.dequantize_weight(chunked), spec.dequantize_weight(whole))


@every_scheme
def test_ids_and_facts(name):
    scheme = SCHEMES[name]
    for sm, layout in ((None, "humming_raw"), (90, "humming")):
        spec = HummingSpec(scheme, sm)
        signature = spec.physical_signature
        fields = dict(signature.fields)
        assert signature.layout == layout
        assert signature.format == scheme.weight.dtype
        assert signature.storage_dtype == "int32"
        assert signature.block_shape == scheme.weight.block_shape
        assert fields["activation"] == ("a16" if scheme.input is None else scheme.input.dtype)
        assert ("input_scale" in fields) is (scheme.input is not None)
        assert spec.spec_id.startswith(f"{layout}_{scheme.weight.dtype}_{fields['activation']}_")
    assert HummingSpec(SCHEMES["w4a16"], 90).spec_id == "humming_int4_a16_1x32"
    assert (
        HummingSpec(SCHEMES["fp8_e4m3_a8"], 90).spec_id == "humming_fp8_e4m3_fp8_e4m3_per_channel"
    )


@pytest.mark.parametrize(
    ("name", "scale_dtype", "scale_type", "second"),
    [
        ("w4a16", None, "group", "none"),
        ("fp8_e4m3_a8", None, "channel", "none"),
        ("fp8_e5m2_block_a8", "fp32", "block", "none"),
        ("mxfp4_a16", "fp8_e8m0", "group", "none"),
        ("nvfp4_a16", "fp8_e4m3", "group", "tensor"),
    ],
)
def test_scale_facts(name, scale_dtype, scale_type, second):
    signature = HummingSpec(SCHEMES[name], 90).physical_signature
    fields = dict(signature.fields)
    assert (signature.scale_dtype, fields["scale_type"], fields["scale_2_type"]) == (
        scale_dtype,
        scale_type,
        second,
    )


@pytest.mark.parametrize(
    ("name", "top"), [("w8a8_int8", 127), ("fp8_e4m3_a8", 448), ("fp8_e5m2_a8", 57344)]
)
def test_activations_get_a_scale_per_token(name, top, make_layer):
    spec = materialize(SCHEMES[name])
    layer = make_layer()
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    x[0, 0] = 0
    x[1, 2] *= 1e6
    view = spec.quantize_activation(x, layer)
    maxima = x.reshape(6, 64).abs().amax(1)
    torch.testing.assert_close(view.x_scale, (maxima / top).clamp_min(1e-30))
    assert view.x.float().abs().amax(1)[1:].tolist() == [top] * 5
    fake = spec.fake_quantize_activation(x, layer)
    assert fake.shape == x.shape
    worst = {127: 0.5 / 127, 448: 2**-4, 57344: 2**-3}[top]
    assert ((fake - x).reshape(6, 64).abs().amax(1) <= maxima * worst * 1.001).all()
    assert not fake[0, 0].any()


def test_sixteen_bit_inputs_are_not_quantized(make_layer):
    spec = materialize(SCHEMES["w4a16"])
    assert not spec.needs_act_quant
    with pytest.raises(QuantConfigError, match="does not quantize its input"):
        spec.quantize_activation(torch.ones(1, 64), make_layer())


def test_raw_layers_take_widths_that_no_tile_divides(make_layer):
    spec = materialize(SCHEMES["w4a16"])
    weight = source(7, 32)
    layer = loaded_layer(
        make_layer, spec, AllocationRequest((7, 32), torch.float32), {None: weight}
    )
    assert torch.equal(
        spec.dequantize_weight(layer), expected_of(weight, SCHEMES["w4a16"], torch.float32)
    )
