"""Fused legs, slices of ranks, and everything that a checkpoint can get wrong."""

import pytest
import torch

from phyai_quant import QuantConfigError, TensorQuant
from phyai_quant.specs.base import AllocationRequest, LegSlice
from phyai_quant.specs.int8 import Int8Spec
from phyai_quant.specs.int_packed import IntPackedSpec

WIDTHS = {"q": 16, "k": 8, "v": 5}
IDS = tuple(WIDTHS)
KINDS = {
    "int8 per_tensor": Int8Spec(TensorQuant("int8", "per_tensor", symmetric=False)),
    "int8 per_channel": Int8Spec(TensorQuant("int8", "per_channel", symmetric=False)),
    "int8 g16": Int8Spec(TensorQuant("int8", "block", symmetric=False, block_shape=(1, 16))),
    "int8 block": Int8Spec(TensorQuant("int8", "block", block_shape=(4, 16))),
    "int8 packed g16": IntPackedSpec(
        TensorQuant("int8", "block", symmetric=False, block_shape=(1, 16))
    ),
    "int4 per_channel": IntPackedSpec(TensorQuant("int4", "per_channel", symmetric=False)),
    "int4 g16": IntPackedSpec(TensorQuant("int4", "block", symmetric=False, block_shape=(1, 16))),
    "int4 actorder": IntPackedSpec(
        TensorQuant("int4", "block", symmetric=False, block_shape=(1, 16), act_order=True)
    ),
    "int8 actorder": Int8Spec(
        TensorQuant("int8", "block", block_shape=(1, 16), act_order=True),
        TensorQuant("int8", "per_channel", dynamic=True),
    ),
}
UNORDERED = [name for name in KINDS if "actorder" not in name]


@pytest.fixture(params=KINDS)
def spec(request):
    return KINDS[request.param]


@pytest.fixture(params=["rows", "packed"])
def form(request):
    return request.param


def read(spec, layer):
    spec.process_after_loading(layer)
    return spec.dequantize_weight(layer)


def test_legs_arrive_apart_in_any_order(spec, form, checkpoint_of, allocate, load):
    legs = {shard: checkpoint_of(spec.weight, (w, 48), seed=w) for shard, w in WIDTHS.items()}
    layer = allocate(
        spec, (29, 48), "a.qkv_proj", logical_widths=tuple(WIDTHS.values()), shard_ids=IDS
    )
    for shard in ("v", "q", "k"):
        load(spec, layer, legs[shard], form, shard)
    expected = torch.cat([legs[shard].expected() for shard in IDS])
    assert torch.equal(read(spec, layer), expected)


def test_a_natively_fused_checkpoint_fills_all_legs(spec, form, checkpoint_of, allocate, load):
    checkpoint = checkpoint_of(spec.weight, (29, 48))
    layer = allocate(spec, (29, 48), logical_widths=tuple(WIDTHS.values()), shard_ids=IDS)
    load(spec, layer, checkpoint, form)
    assert spec.missing_parts(layer) == []
    assert torch.equal(read(spec, layer), checkpoint.expected())


def test_fused_scalars_one_per_leg(allocate):
    spec = KINDS["int8 per_tensor"]
    layer = allocate(spec, (6, 2), logical_widths=(3, 1, 2), shard_ids=IDS)
    spec.load_weight(layer, "weight", torch.ones(6, 2, dtype=torch.int8))
    spec.load_weight(layer, "weight_scale", torch.tensor([1.0, 2.0, 3.0]))
    spec.load_weight(layer, "weight_zero_point", torch.tensor([0, 2, -1], dtype=torch.int8))
    assert read(spec, layer)[:, 0].tolist() == [1.0, 1.0, 1.0, -2.0, 6.0, 6.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_a_rank(spec, form, rank, checkpoint_of, allocate, load):
    """Two legs of 16 and 8 rows: each rank holds half of both."""
    legs = {shard: checkpoint_of(spec.weight, (WIDTHS[shard], 48), seed=7) for shard in "qk"}
    slices = (LegSlice((16, 48), row_start=8 * rank), LegSlice((8, 48), row_start=4 * rank))
    layer = allocate(spec, (12, 48), logical_widths=(8, 4), shard_ids=("q", "k"), slices=slices)
    for shard, leg in legs.items():
        load(spec, layer, leg, form, shard)
    q, k = (legs[shard].expected() for shard in "qk")
    expected = torch.cat([q[8 * rank : 8 * rank + 8], k[4 * rank : 4 * rank + 4]])
    assert torch.equal(read(spec, layer), expected)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("name", UNORDERED)
def test_columns_of_a_rank(name, form, rank, checkpoint_of, allocate, load):
    spec = KINDS[name]
    checkpoint = checkpoint_of(spec.weight, (7, 96))
    start = 32 * rank
    layer = allocate(spec, (7, 32), slices=(LegSlice((7, 96), column_start=start),))
    load(spec, layer, checkpoint, form)
    assert torch.equal(read(spec, layer), checkpoint.expected()[:, start : start + 32])


def test_rows_of_a_rank_in_a_natively_fused_checkpoint(checkpoint_of, allocate, load):
    """Zero points are packed over both legs of 11 rows, and the ranks cut at odd rows."""
    spec = KINDS["int4 g16"]
    checkpoint = checkpoint_of(spec.weight, (22, 32))
    slices = (LegSlice((11, 32), row_start=3), LegSlice((11, 32), row_start=6))
    layer = allocate(spec, (10, 32), logical_widths=(5, 5), shard_ids=(0, 1), slices=slices)
    load(spec, layer, checkpoint)
    expected = checkpoint.expected()
    assert torch.equal(read(spec, layer), torch.cat([expected[3:8], expected[17:22]]))


def test_legs_may_have_different_orders(checkpoint_of, allocate, load):
    spec = KINDS["int4 actorder"]
    legs = [checkpoint_of(spec.weight, (8, 64), seed=seed) for seed in (1, 2)]
    assert not torch.equal(legs[0].order, legs[1].order)
    layer = allocate(spec, (16, 64), logical_widths=(8, 8), shard_ids=(0, 1))
    for shard, leg in enumerate(legs):
        load(spec, layer, leg, "packed", shard)
    assert torch.equal(read(spec, layer), torch.cat([leg.expected() for leg in legs]))


def test_an_order_that_was_never_set_is_the_order_of_k(checkpoint_of, allocate, load):
    spec = KINDS["int4 actorder"]
    checkpoint = checkpoint_of(spec.weight, (8, 64))
    layer = allocate(spec, (8, 64))
    checkpoint.order = torch.full((64,), -1)
    load(spec, layer, checkpoint)
    checkpoint.order = torch.arange(64) // 16
    assert torch.equal(read(spec, layer), checkpoint.expected())


def test_an_order_needs_all_of_k(allocate):
    spec = KINDS["int4 actorder"]
    with pytest.raises(QuantConfigError, match=r"a\.down_proj: actorder .* 32 to 64 of 64; use"):
        allocate(spec, (8, 32), slices=(LegSlice((8, 64), column_start=32),))


@pytest.mark.parametrize("damage", ["uneven", "negative", "too high"])
def test_damaged_orders(damage, checkpoint_of, allocate):
    spec = KINDS["int4 actorder"]
    layer = allocate(spec, (8, 64))
    order = checkpoint_of(spec.weight, (8, 64)).order
    order[0] = {"uneven": (order[0] + 1) % 4, "negative": -1, "too high": 4}[damage]
    with pytest.raises(QuantConfigError, match="each of the groups 0 to 3 for exactly 16 columns"):
        spec.load_weight(layer, "weight_g_idx", order)
    assert "a.down_proj.weight_g_idx" in spec.missing_parts(layer)


def test_parts_that_never_arrive_are_an_error(checkpoint_of, allocate, load):
    act = TensorQuant("int8", "per_tensor", symmetric=False)
    quant = TensorQuant("int4", "block", symmetric=False, block_shape=(1, 16), act_order=True)
    spec = IntPackedSpec(quant, act)
    layer = allocate(spec, (16, 32), "a.gate_up_proj", logical_widths=(8, 8), shard_ids=(0, 1))
    assert layer.weight_scale.isnan().all()
    assert layer.input_scale.isnan().all()
    load(spec, layer, checkpoint_of(quant, (8, 32)), "rows", 0)
    spec.load_weight(layer, "input_scale", torch.tensor(1.0), 0)
    missing = [
        "a.gate_up_proj.weight_packed[1]",
        "a.gate_up_proj.weight_scale[1]",
        "a.gate_up_proj.weight_zero_point[1]",
        "a.gate_up_proj.weight_g_idx[1]",
        "a.gate_up_proj.input_scale[1]",
        "a.gate_up_proj.input_zero_point[0]",
        "a.gate_up_proj.input_zero_point[1]",
    ]
    assert spec.missing_parts(layer) == missing
    with pytest.raises(QuantConfigError, match="never loaded") as error:
        spec.process_after_loading(layer)
    assert all(name in str(error.value) for name in missing)
    with pytest.raises(QuantConfigError, match="call process_after_loading before reading"):
        spec.dequantize_weight(layer)


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("weight", torch.zeros(8, 32), r"'weight' is torch\.float32; allowed: torch\.int8; check"),
        ("weight", torch.zeros(8, 4, dtype=torch.int8), r"shape \[8, 4\], the layer expects \[8,"),
        ("weight", torch.full((8, 32), 8, dtype=torch.int8), "codes 8 to 8, .* int4; allowed: -8"),
        ("weight_packed", torch.zeros(8, 32, dtype=torch.int32), r"expects \[8, 4\]"),
        ("weight_packed", torch.zeros(8, 16, dtype=torch.uint8), "'weight_packed' is torch.uint8"),
        ("weight_shape", torch.tensor([8, 16]), r"'weight_shape' says \[8, 16\], .* \[8, 32\]"),
        ("weight_shape", torch.tensor([8.0, 32.0]), "'weight_shape' is torch.float32"),
        ("weight_scale", torch.ones(8, 3), r"'weight_scale' has shape \[8, 3\].*\[8, 2\]"),
        ("weight_scale", torch.ones(8, 2, dtype=torch.int8), "'weight_scale' is torch.int8"),
        ("weight_zero_point", torch.zeros(8, 2), "'weight_zero_point' is torch.float32"),
        ("weight_zero_point", torch.zeros(8, 2, dtype=torch.int32), r"expects \[1, 2\]"),
        ("weight_zero_point", torch.full((8, 2), -9, dtype=torch.int8), "allowed: -8 to 7"),
        ("weight_g_idx", torch.zeros(32), "'weight_g_idx' is torch.float32"),
        ("weight_g_idx", torch.zeros(16, dtype=torch.int64), r"shape \[16\], .* \[32\]"),
        ("input_scale", torch.ones(2), r"'input_scale' has shape \[2\], .* \[\] or \[1\]"),
        ("input_zero_point", torch.tensor(300, dtype=torch.int32), "allowed: -128 to 127"),
        ("weight_scale_2", torch.ones(1), "'weight_scale_2' with this format; allowed: weight"),
    ],
)
def test_bad_tensors_name_the_layer(name, tensor, text, allocate):
    quant = TensorQuant("int4", "block", symmetric=False, block_shape=(1, 16), act_order=True)
    spec = IntPackedSpec(quant, TensorQuant("int8", "per_tensor", symmetric=False))
    layer = allocate(spec, (8, 32))
    with pytest.raises(QuantConfigError, match=rf"a\.down_proj: .*{text}"):
        spec.load_weight(layer, name, tensor)
    assert len(spec.missing_parts(layer)) == 6


def test_zero_points_of_a_symmetric_weight(allocate):
    spec = IntPackedSpec(TensorQuant("int4", "per_channel"), TensorQuant("int8", "per_tensor"))
    layer = allocate(spec, (8, 32))
    spec.load_weight(layer, "weight_zero_point", torch.zeros(8, 1, dtype=torch.int8))
    packed_zeros = torch.tensor([[-0x77777778]], dtype=torch.int32)  # every nibble is 8
    spec.load_weight(layer, "weight_zero_point", packed_zeros)
    spec.load_weight(layer, "input_zero_point", torch.zeros(1, dtype=torch.int8))
    for name, shape in (("weight_zero_point", (8, 1)), ("input_zero_point", (1,))):
        with pytest.raises(QuantConfigError, match=f"'{name}'.*config says.*symmetric"):
            spec.load_weight(layer, name, torch.ones(shape, dtype=torch.int8))


def test_packed_zero_points_need_rows(allocate):
    spec = Int8Spec(TensorQuant("int8", "per_tensor", symmetric=False))
    layer = allocate(spec, (8, 32))
    with pytest.raises(QuantConfigError, match="packs the zero points of rows, but the weight is"):
        spec.load_weight(layer, "weight_zero_point", torch.zeros(1, dtype=torch.int32))


def test_codes_under_two_names(checkpoint_of, allocate, load):
    spec = KINDS["int8 per_channel"]
    checkpoint = checkpoint_of(spec.weight, (4, 8))
    layer = allocate(spec, (4, 8))
    load(spec, layer, checkpoint, "rows")
    spec.load_weight(layer, "weight", checkpoint.codes)
    with pytest.raises(QuantConfigError, match="twice, now as 'weight_packed' after 'weight'"):
        spec.load_weight(layer, "weight_packed", checkpoint.tensors("packed")["weight_packed"])


def test_a_finished_layer_takes_nothing_more(checkpoint_of, allocate, load):
    spec = KINDS["int8 per_channel"]
    checkpoint = checkpoint_of(spec.weight, (4, 8))
    layer = allocate(spec, (4, 8))
    load(spec, layer, checkpoint, "rows")
    spec.process_after_loading(layer)
    with pytest.raises(QuantConfigError, match="'weight' arrived after process_after_loading"):
        spec.load_weight(layer, "weight", checkpoint.codes)


@pytest.mark.parametrize(
    ("shape", "request_fields", "text"),
    [
        ((8, 4304), {}, "K = 4304 is not a multiple of the group size 32"),
        (
            (8, 48),
            {"slices": (LegSlice((8, 96)),)},
            "the slice of K = 48 is not a multiple of the group size 32",
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_groups_must_divide_k(dtype, shape, request_fields, text, allocate):
    spec = IntPackedSpec(TensorQuant(dtype, "block", block_shape=(1, 32)))
    with pytest.raises(QuantConfigError, match=rf"a\.down_proj: {text}; allowed: whole groups"):
        allocate(spec, shape, **request_fields)


def test_blocks_must_fit_legs_and_ranks(allocate):
    spec = KINDS["int8 block"]
    with pytest.raises(QuantConfigError, match=r"leg 0, elements 0 to 6 .* of 'weight_scale'"):
        allocate(spec, (14, 32), logical_widths=(6, 8), shard_ids=(0, 1))
    with pytest.raises(QuantConfigError, match=r"8 to 24 of 32 do not fit the entries of 'weight_"):
        allocate(spec, (8, 16), slices=(LegSlice((8, 32), column_start=8),))


def test_words_must_fit_ranks(checkpoint_of, allocate):
    spec = KINDS["int4 per_channel"]
    tensors = checkpoint_of(spec.weight, (4, 24)).tensors("packed")
    layer = allocate(spec, (4, 12), slices=(LegSlice((4, 24), column_start=12),))
    with pytest.raises(QuantConfigError, match="do not fit the entries of 'weight_packed'"):
        spec.load_weight(layer, "weight_packed", tensors["weight_packed"])


def test_layers_that_cannot_compute(allocate, make_layer):
    spec = KINDS["int8 per_channel"]
    with pytest.raises(QuantConfigError, match=r"params_dtype torch\.int8 is not supported"):
        spec.allocate(make_layer("a"), AllocationRequest((2, 2), torch.int8))
    with pytest.raises(QuantConfigError, match="allocate the weight before loading"):
        spec.load_weight(make_layer("a"), "weight", torch.zeros(2, 2, dtype=torch.int8))
    layer = allocate(spec, (4, 2), logical_widths=(2, 2), shard_ids=(0, 1))
    with pytest.raises(QuantConfigError, match="unknown leg 'q'; allowed: 0, 1"):
        spec.load_weight(layer, "weight", torch.zeros(2, 2, dtype=torch.int8), "q")


@pytest.mark.gpu
def test_a_device_reads_the_same_weight(spec, form, checkpoint_of, allocate, load):
    checkpoint = checkpoint_of(spec.weight, (13, 48))
    layer = allocate(spec, (13, 48), device="cuda")
    load(spec, layer, checkpoint, form)
    weight = read(spec, layer)
    assert weight.is_cuda
    assert torch.equal(weight.cpu(), checkpoint.expected())
