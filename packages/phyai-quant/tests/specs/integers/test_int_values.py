"""Weights read back from checkpoints of one rank and one leg."""

import pytest
import torch

from phyai_quant import QuantConfigError, QuantScheme, TensorQuant, materialize
from phyai_quant.specs import int8, int_packed
from phyai_quant.specs.base import PhysicalSignature
from phyai_quant.specs.int8 import Int8Spec
from phyai_quant.specs.int_packed import IntPackedSpec

TOKEN_INT8 = TensorQuant("int8", "per_channel", dynamic=True)
SPECS = {"int8": Int8Spec, "int4": IntPackedSpec}


def kinds(dtype, symmetric=True):
    return {
        "per_tensor": TensorQuant(dtype, "per_tensor", symmetric=symmetric),
        "per_channel": TensorQuant(dtype, "per_channel", symmetric=symmetric),
        "g8": TensorQuant(dtype, "block", symmetric=symmetric, block_shape=(1, 8)),
        "block": TensorQuant(dtype, "block", symmetric=symmetric, block_shape=(4, 8)),
        "actorder": TensorQuant(
            dtype, "block", symmetric=symmetric, block_shape=(1, 8), act_order=True
        ),
    }


@pytest.mark.parametrize("shape", [(1, 8), (2, 24), (7, 32), (13, 40)], ids=str)
@pytest.mark.parametrize("form", ["rows", "packed"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("kind", kinds("int4"))
@pytest.mark.parametrize(
    ("spec_class", "dtype"),
    [(Int8Spec, "int8"), (IntPackedSpec, "int8"), (IntPackedSpec, "int4")],
    ids=["int8", "int8_packed", "int4_packed"],
)
def test_weights_are_what_a_loop_computes(
    spec_class, dtype, kind, symmetric, form, shape, checkpoint_of, allocate, load
):
    quant = kinds(dtype, symmetric)[kind]
    if kind == "block" and not symmetric:
        form = "rows"  # zero points of blocks are never packed
    checkpoint = checkpoint_of(quant, shape)
    spec = spec_class(quant)
    layer = allocate(spec, shape)
    load(spec, layer, checkpoint, form)
    spec.process_after_loading(layer)
    assert torch.equal(spec.signed_codes(layer), checkpoint.codes)
    assert torch.equal(spec.dequantize_weight(layer), checkpoint.expected())


@pytest.mark.parametrize("columns", [1, 3, 7, 9, 37])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("form", ["rows", "packed"])
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_words_may_be_partial(dtype, form, symmetric, columns, checkpoint_of, allocate, load):
    quant = kinds(dtype, symmetric)["per_channel"]
    checkpoint = checkpoint_of(quant, (5, columns))
    for spec in (IntPackedSpec(quant), SPECS[dtype](quant)):
        layer = allocate(spec, (5, columns))
        load(spec, layer, checkpoint, form)
        spec.process_after_loading(layer)
        assert torch.equal(spec.dequantize_weight(layer), checkpoint.expected())


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_low_precision_scales_are_kept_exactly(dtype, scale_dtype, checkpoint_of, allocate, load):
    quant = kinds(dtype)["g8"]
    checkpoint = checkpoint_of(quant, (3, 16), scale_dtype=scale_dtype)
    spec = SPECS[dtype](quant)
    layer = allocate(spec, (3, 16))
    load(spec, layer, checkpoint, "rows")
    spec.process_after_loading(layer)
    assert layer.weight_scale.dtype == torch.float32
    assert torch.equal(spec.dequantize_weight(layer), checkpoint.expected())


@pytest.mark.parametrize("dtype", ["int4", "int8"])
@pytest.mark.parametrize("form", ["rows", "packed"])
def test_strided_sources_zero_rows_and_huge_scales(dtype, form, checkpoint_of, allocate):
    quant = kinds(dtype, symmetric=False)["g8"]
    checkpoint = checkpoint_of(quant, (9, 24))
    checkpoint.scale[0] = 1e36
    checkpoint.scale[1] = 0
    spec = SPECS[dtype](quant)
    layer = allocate(spec, (9, 24))
    for name, tensor in checkpoint.tensors(form).items():
        source = tensor
        if tensor.ndim == 2:
            wide = torch.zeros(tensor.shape[1] * 2, tensor.shape[0], dtype=tensor.dtype)
            source = wide[::2].t()
            source.copy_(tensor)
            assert tensor.shape[0] == 1 or not source.is_contiguous()
        spec.load_weight(layer, name, source)
    spec.process_after_loading(layer)
    assert torch.equal(spec.dequantize_weight(layer), checkpoint.expected())
    assert (spec.dequantize_weight(layer)[1] == 0).all()


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((5,), "per_channel"), ((5, 1), "per_channel"), ((), "per_channel"), ((1, 1), "per_tensor")],
    ids=str,
)
def test_shapes_of_scales(shape, kind, allocate):
    spec = Int8Spec(kinds("int8")[kind], TOKEN_INT8)
    layer = allocate(spec, (5, 3))
    scale = torch.arange(1.0, 6.0).reshape(shape) if 5 in shape else torch.full(shape, 2.0)
    spec.load_weight(layer, "weight_scale", scale)
    assert torch.equal(layer.weight_scale, scale.reshape(-1).expand(5))


def test_groups_of_half_of_n_and_k_multiply_an_identity(checkpoint_of, allocate, load):
    """K = 128, N = 64 in groups of 64: N divisible by 64 and not by 128."""
    quant = TensorQuant("int4", "block", block_shape=(1, 64))
    checkpoint = checkpoint_of(quant, (64, 128))
    spec = materialize(QuantScheme(quant))
    layer = allocate(spec, (64, 128))
    load(spec, layer, checkpoint)
    spec.process_after_loading(layer)
    product = torch.nn.functional.linear(torch.eye(128), spec.dequantize_weight(layer))
    assert torch.equal(product.t(), checkpoint.expected())


def test_processing_twice_changes_nothing(checkpoint_of, allocate, load):
    quant = kinds("int8", symmetric=False)["per_channel"]
    act = TensorQuant("int8", "per_tensor", symmetric=False)
    spec = Int8Spec(quant, act)
    layer = allocate(spec, (3, 5))
    load(spec, layer, checkpoint_of(quant, (3, 5)), "rows")
    spec.load_weight(layer, "input_scale", torch.tensor([0.5]))
    spec.load_weight(layer, "input_zero_point", torch.tensor([-3], dtype=torch.int8))
    spec.process_after_loading(layer)
    before = dict(layer.named_parameters())
    spec.process_after_loading(layer)
    after = dict(layer.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert not any(parameter.requires_grad for parameter in after.values())


@pytest.mark.parametrize(
    ("weight", "act", "expected", "storage"),
    [
        (TensorQuant("int8", "per_channel"), None, Int8Spec, torch.int8),
        (TensorQuant("int8", "per_tensor"), TOKEN_INT8, Int8Spec, torch.int8),
        (TensorQuant("int8", "block", block_shape=(1, 32)), TOKEN_INT8, Int8Spec, torch.int8),
        (TensorQuant("int8", "block", block_shape=(1, 32)), None, IntPackedSpec, torch.int32),
        (TensorQuant("int4", "per_channel"), None, IntPackedSpec, torch.int32),
        (TensorQuant("int4", "block", block_shape=(1, 64)), TOKEN_INT8, IntPackedSpec, torch.int32),
    ],
)
def test_which_form_is_kept(weight, act, expected, storage):
    spec = materialize(QuantScheme(weight, act))
    assert type(spec) is expected
    assert spec.weight_dtype == storage
    assert spec.needs_act_quant is (act is not None)


@pytest.mark.parametrize(
    "scheme",
    [
        None,
        QuantScheme(TensorQuant("bf16", "per_tensor")),
        QuantScheme(TensorQuant("fp8_e4m3", "per_channel")),
        QuantScheme(TensorQuant("int8", "per_channel"), TOKEN_INT8, online=True),
        QuantScheme(TensorQuant("int4", "block", block_shape=(1, 32)), online=True),
        QuantScheme(TensorQuant("int8", "per_channel", rotation_group=64), TOKEN_INT8),
        QuantScheme(TensorQuant("int8", "per_channel", dynamic=True)),
        QuantScheme(TensorQuant("int4", "per_channel"), TensorQuant("fp8_e5m2", "per_tensor")),
    ],
)
@pytest.mark.parametrize("module", [int8, int_packed])
def test_other_schemes_are_left_to_others(module, scheme):
    assert module.build(scheme, None) is None


def test_signatures():
    quant = TensorQuant("int4", "block", symmetric=False, block_shape=(1, 64))
    assert IntPackedSpec(quant).physical_signature == PhysicalSignature(
        "int4",
        layout="packed",
        block_shape=(1, 64),
        scale_dtype="fp32",
        granularity="block",
        storage_dtype="int32",
        fields=(("activation", "a16"), ("symmetric", False), ("act_order", False)),
    )
    act = TensorQuant("int8", "per_tensor", symmetric=False)
    assert Int8Spec(TensorQuant("int8", "per_channel"), act).physical_signature == (
        PhysicalSignature(
            "int8",
            scale_dtype="fp32",
            granularity="per_channel",
            storage_dtype="int8",
            fields=(
                ("activation", "int8"),
                ("symmetric", True),
                ("act_order", False),
                ("input_granularity", "per_tensor"),
                ("input_scale", "static"),
                ("input_symmetric", False),
            ),
        )
    )


def test_names_follow_the_scheme():
    base_names = ("weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point")
    assert Int8Spec(kinds("int8")["per_channel"], TOKEN_INT8).tensor_names() == base_names
    ordered = IntPackedSpec(kinds("int4")["actorder"])
    assert ordered.tensor_names() == (*base_names, "weight_g_idx")
    assert ordered.spec_id == "int4_packed_block_1_8_actorder_a16"
    static = Int8Spec(kinds("int8")["per_channel"], TensorQuant("int8", "per_tensor"))
    assert static.tensor_names() == (*base_names, "input_scale", "input_zero_point")
    assert static.spec_id == "int8_per_channel_int8"


def test_rows_hold_int8_only():
    with pytest.raises(QuantConfigError, match="weight is int4 per_channel; allowed: int8 in rows"):
        Int8Spec(TensorQuant("int4", "per_channel"))


@pytest.mark.parametrize(
    ("weight", "act", "text"),
    [
        (TensorQuant("fp8_e4m3", "per_channel"), None, "fp8_e4m3 per_channel; allowed: int4, int8"),
        (TOKEN_INT8, None, "dynamic; allowed: int4, int8 with stored scales"),
        (TensorQuant("int8", "per_channel", rotation_group=16), None, "weight that is not rotated"),
        (
            TensorQuant("int8", "per_channel", act_order=True),
            None,
            "an activation order is allowed",
        ),
        (
            TensorQuant("int8", "block", block_shape=(2, 8), act_order=True),
            None,
            r"an activation order is allowed with block_shape \(1, group along K\)",
        ),
        (
            TensorQuant("int8", "per_channel"),
            TensorQuant("int8", "per_channel"),
            "input is int8 per_channel; a static scale is allowed per_tensor only",
        ),
        (
            TensorQuant("int8", "per_channel"),
            TensorQuant("nvfp4", "block", micro_scaled=True, block_shape=(1, 16)),
            "input is nvfp4 .*allowed: fp32 scales",
        ),
        (
            TensorQuant("int8", "per_channel"),
            TensorQuant("fp8_e5m2", "per_tensor"),
            "input is fp8_e5m2 per_tensor; allowed: int8, fp8_e4m3 or unquantized",
        ),
        (
            TensorQuant("int4", "per_channel"),
            TensorQuant("int4", "per_channel", dynamic=True),
            "input is int4 per_channel dynamic; allowed: int8",
        ),
        (
            TensorQuant("int4", "per_channel"),
            TensorQuant("fp8_e4m3", "per_tensor", symmetric=False),
            "asymmetric; allowed: symmetric fp8_e4m3",
        ),
        (
            TensorQuant("int4", "per_channel"),
            TensorQuant("int8", "block", dynamic=True, block_shape=(2, 8)),
            r"allowed block_shape: \(1, group along K\)",
        ),
    ],
)
def test_schemes_that_are_refused(weight, act, text):
    with pytest.raises(QuantConfigError, match=f"integer weights cannot be stored.*{text}"):
        IntPackedSpec(weight, act)
