import pytest
import torch
from torch import nn

from phyai_quant import QuantConfigError
from phyai_quant.specs import base, loading


def test_signature_is_normalised():
    signature = base.PhysicalSignature(
        "INT8",
        layout="ConvRot",
        scale_dtype=torch.float32,
        granularity="PER_CHANNEL",
        storage_dtype=torch.int8,
        fields=(("Rotation_group", 64), ("Activation", "INT8")),
    )
    assert signature == base.PhysicalSignature(
        "int8",
        layout="convrot",
        scale_dtype="fp32",
        granularity="per_channel",
        storage_dtype="int8",
        fields=(("activation", "int8"), ("rotation_group", 64)),
    )
    assert hash(signature) == hash(signature)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "fp32"),
        (torch.float16, "fp16"),
        (torch.bfloat16, "bf16"),
        (torch.float8_e4m3fn, "fp8_e4m3"),
        (torch.float8_e5m2, "fp8_e5m2"),
        ("torch.float8_e8m0fnu", "fp8_e8m0"),
        ("BF16", "bf16"),
        (torch.int8, "int8"),
    ],
)
def test_dtype_names(dtype, name):
    assert base.dtype_name(dtype) == name


def test_request_defaults_to_one_leg():
    request = base.AllocationRequest([5, 3], torch.float32)
    assert request.weight_shape == (5, 3)
    assert request.logical_widths == (5,)
    assert request.shard_ids == (None,)


@pytest.mark.parametrize(
    ("widths", "ids", "text"),
    [
        ((2, 2), ("q", "k"), "must be positive and sum to N = 5"),
        ((5, 0), ("q", "k"), "must be positive and sum to N = 5"),
        ((2, 3), ("q",), "must pair one to one"),
        ((2, 3), ("q", "q"), "must pair one to one"),
    ],
)
def test_bad_widths_are_refused(widths, ids, text):
    with pytest.raises(QuantConfigError, match=text):
        base.AllocationRequest((5, 3), torch.float32, widths, ids)


def test_missing_parts_follow_legs():
    request = base.AllocationRequest((5, 3), torch.float32, (2, 3), ("q", "k"))
    state = loading.LoadState(request, ("weight", "weight_scale"))
    assert state.rows(0) == slice(0, 2)
    assert state.rows(1) == slice(2, 5)
    state.loaded |= {("weight", 0), ("weight_scale", 1)}
    assert state.missing("a.qkv") == ["a.qkv.weight[k]", "a.qkv.weight_scale[q]"]


def test_a_layer_without_storage_says_so(make_layer):
    with pytest.raises(QuantConfigError, match="down_proj: allocate the weight before loading"):
        loading.load_state(make_layer())
    assert loading.layer_name(nn.Linear(1, 1)) == "Linear"
