import itertools

import pytest

from phyai_quant import QDType, QuantConfigError, QuantScheme, TensorQuant
from phyai_quant.online_rules import check_online_scheme, find_violation, minimum_sm

ALLOWED_PAIRS = {
    ("int4", None),
    ("int4", "int8"),
    ("int4", "fp8_e4m3"),
    ("int8", None),
    ("int8", "int8"),
    ("fp8_e4m3", None),
    ("fp8_e4m3", "fp8_e4m3"),
    ("fp8_e5m2", None),
    ("fp8_e5m2", "fp8_e5m2"),
    ("nvfp4", None),
    ("nvfp4", "nvfp4"),
    ("mxfp4", None),
}
MICRO = {"nvfp4": (1, 16), "mxfp4": (1, 32)}


def weight(dtype):
    if dtype in MICRO:
        return TensorQuant(dtype, "block", micro_scaled=True, block_shape=MICRO[dtype])
    return TensorQuant(dtype, "per_channel")


def token(dtype):
    if dtype in MICRO:
        return TensorQuant(
            dtype, "block", dynamic=True, micro_scaled=True, block_shape=MICRO[dtype]
        )
    return None if dtype is None else TensorQuant(dtype, "per_channel", dynamic=True)


INPUTS = [None, "int8", "fp8_e4m3", "fp8_e5m2", "nvfp4", "mxfp4"]
PAIRS = list(itertools.product([d.value for d in QDType], INPUTS))
ROTATED = {
    "int8": TensorQuant("int8", "per_channel", rotation_group=64),
    "nvfp4": TensorQuant(
        "nvfp4", "block", micro_scaled=True, block_shape=(1, 16), rotation_group=64
    ),
}


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_exactly_the_listed_pairs_are_allowed(pair):
    scheme = QuantScheme(weight(pair[0]), token(pair[1]), online=True)
    if pair in ALLOWED_PAIRS:
        check_online_scheme(scheme)
    else:
        with pytest.raises(QuantConfigError, match=r"(input|weight)\.dtype is"):
            check_online_scheme(scheme)


@pytest.mark.parametrize(
    ("dtype", "shape", "act", "allowed"),
    [
        ("int4", (1, 16), None, True),
        ("int4", (1, 16), "int8", False),
        ("int4", (1, 32), "int8", True),
        ("int8", (1, 15), None, False),
        ("int8", (1, 8), None, False),
        ("int8", (64, 64), None, False),
        ("fp8_e4m3", (64, 64), None, True),
        ("fp8_e4m3", (1, 128), None, True),
        ("fp8_e5m2", (96, 128), None, False),
        ("fp8_e5m2", (32, 128), None, False),
        ("fp8_e4m3", (128, 16), "fp8_e4m3", False),
    ],
)
def test_block_shapes(dtype, shape, act, allowed):
    scheme = QuantScheme(TensorQuant(dtype, "block", block_shape=shape), token(act), online=True)
    violation = find_violation(scheme)
    assert (violation is None) is allowed
    if violation is not None:
        assert violation.field.startswith("weight.block_shape")


def test_act_order_and_micro_scaled_inputs_are_refused():
    ordered = TensorQuant("int4", "block", block_shape=(1, 64), act_order=True)
    assert find_violation(QuantScheme(ordered, online=True)).field == "weight.act_order"
    act = TensorQuant("int8", "per_channel", dynamic=True, micro_scaled=True)
    scheme = QuantScheme(TensorQuant("int8", "per_channel"), act, online=True)
    assert find_violation(scheme).field == "input.micro_scaled"


@pytest.mark.parametrize(
    ("dtype", "act", "floor"),
    [
        ("int4", None, 80),
        ("int4", "int8", 80),
        ("int4", "fp8_e4m3", 89),
        ("fp8_e4m3", None, 80),
        ("fp8_e4m3", "fp8_e4m3", 89),
        ("fp8_e5m2", "fp8_e5m2", 89),
        ("mxfp4", None, 80),
        ("nvfp4", None, 80),
    ],
)
def test_architecture_floors(dtype, act, floor):
    assert minimum_sm(QuantScheme(weight(dtype), token(act), online=True)) == floor


@pytest.mark.parametrize("act", INPUTS)
@pytest.mark.parametrize("dtype", ROTATED)
def test_pairs_of_rotated_weights(dtype, act):
    violation = find_violation(QuantScheme(ROTATED[dtype], token(act), online=True))
    if (dtype, act) in {("int8", "int8"), ("nvfp4", None), ("nvfp4", "nvfp4")}:
        assert violation is None
    else:
        assert violation.field == "input.dtype"
        assert f"with weight.rotation_group 64 on {dtype}" in violation.allowed


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"block_shape": (1, 32)}, "input.block_shape"),
        ({"granularity": "per_channel", "block_shape": None}, "input.block_shape"),
        ({"micro_scaled": False}, "input.micro_scaled"),
        ({"dynamic": False}, "input.dynamic"),
        ({"symmetric": False}, "input.symmetric"),
        ({"rotation_group": 16}, "input.rotation_group"),
    ],
    ids=str,
)
def test_inputs_in_nvfp4_have_its_blocks(fields, field):
    base = {"granularity": "block", "dynamic": True, "micro_scaled": True, "block_shape": (1, 16)}
    act = TensorQuant("nvfp4", **{**base, **fields})
    for scheme in (weight("nvfp4"), ROTATED["nvfp4"]):
        assert find_violation(QuantScheme(scheme, act, online=True)).field == field


def test_scales_that_are_not_stored_have_no_layout():
    swizzled = TensorQuant(
        "nvfp4", "block", micro_scaled=True, block_shape=(1, 16), swizzled_scales=True
    )
    assert find_violation(QuantScheme(swizzled, online=True)).field == "weight.swizzled_scales"
