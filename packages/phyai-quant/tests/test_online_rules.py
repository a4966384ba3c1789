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
    ("mxfp4", None),
}
MICRO = {"nvfp4": (1, 16), "mxfp4": (1, 32)}


def weight(dtype):
    if dtype in MICRO:
        return TensorQuant(dtype, "block", micro_scaled=True, block_shape=MICRO[dtype])
    return TensorQuant(dtype, "per_channel")


def token(dtype):
    return None if dtype is None else TensorQuant(dtype, "per_channel", dynamic=True)


PAIRS = list(itertools.product([d.value for d in QDType], [None, "int8", "fp8_e4m3", "fp8_e5m2"]))


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
