import dataclasses
import json

import pytest

from phyai_quant import Granularity, QDType, QuantConfigError, QuantScheme, TensorQuant


def test_vocabulary_is_closed():
    assert [d.value for d in QDType] == [
        "bf16",
        "fp8_e4m3",
        "fp8_e5m2",
        "int8",
        "int4",
        "nvfp4",
        "mxfp4",
    ]
    assert [g.value for g in Granularity] == ["per_tensor", "per_channel", "block"]


def test_strings_become_members():
    quant = TensorQuant("int8", "per_channel")
    assert quant.dtype is QDType.INT8
    assert quant.granularity is Granularity.PER_CHANNEL
    assert quant == TensorQuant(QDType.INT8, Granularity.PER_CHANNEL)


def test_values_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TensorQuant("int8", "per_channel").dtype = QDType.INT4


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dtype": "int3"}, "dtype 'int3' is not supported; allowed: bf16, fp8_e4m3"),
        ({"granularity": "group"}, "allowed: per_tensor, per_channel, block"),
        ({"granularity": "block"}, "granularity 'block' and block_shape None contradict"),
        ({"block_shape": (1, 128)}, "granularity 'per_channel' and block_shape"),
        ({"granularity": "block", "block_shape": (0, 128)}, "two positive sizes"),
        ({"granularity": "block", "block_shape": (1, 2, 3)}, "two positive sizes"),
        ({"rotation_group": 32}, "rotation_group 32 is not supported; allowed: 16, 64, 256"),
        ({"dtype": "int4", "rotation_group": 64}, "needs dtype 'int8'"),
        ({"dtype": "nvfp4", "rotation_group": 64}, "or dtype 'nvfp4' and block_shape (1, 16)"),
        (
            {
                "dtype": "nvfp4",
                "granularity": "block",
                "block_shape": (1, 32),
                "rotation_group": 64,
            },
            "not 'nvfp4' and 'block' with block_shape (1, 32)",
        ),
        ({"swizzled_scales": True}, "swizzled_scales needs dtype 'nvfp4', not 'int8'"),
        ({"granularity": "per_tensor", "rotation_group": 64}, "granularity 'per_channel'"),
    ],
)
def test_contradictions_are_refused(fields, text):
    with pytest.raises(QuantConfigError) as error:
        TensorQuant(**{"dtype": "int8", "granularity": "per_channel", **fields})
    assert text in str(error.value)


def test_weight_only():
    weight = TensorQuant("int8", "per_channel")
    assert QuantScheme(weight).weight_only
    assert not QuantScheme(weight, weight).weight_only


def test_describe_tells_every_field():
    weight = TensorQuant(
        "int4", "block", symmetric=False, dynamic=True, micro_scaled=True, block_shape=(1, 128)
    )
    assert weight.describe() == "int4 block[1,128] asymmetric dynamic micro-scaled"
    rotated = TensorQuant("int8", "per_channel", rotation_group=64)
    tiled = TensorQuant("nvfp4", "block", block_shape=(1, 16), swizzled_scales=True)
    assert tiled.describe() == "nvfp4 block[1,16] swizzled"
    assert QuantScheme(rotated, online=True).describe() == (
        "weight int8 per_channel rotated by 64, input unquantized, quantized at load"
    )


def test_as_dict_is_json_and_tells_schemes_apart():
    schemes = [
        QuantScheme(TensorQuant("int8", "per_channel")),
        QuantScheme(TensorQuant("int8", "per_channel"), online=True),
        QuantScheme(TensorQuant("int8", "per_channel", rotation_group=16)),
        QuantScheme(TensorQuant("int8", "block", block_shape=(1, 16))),
        QuantScheme(TensorQuant("int8", "block", block_shape=(1, 16), act_order=True)),
        QuantScheme(TensorQuant("int8", "per_channel"), TensorQuant("int8", "per_channel")),
        QuantScheme(TensorQuant("nvfp4", "block", block_shape=(1, 16))),
        QuantScheme(TensorQuant("nvfp4", "block", block_shape=(1, 16), rotation_group=16)),
        QuantScheme(TensorQuant("nvfp4", "block", block_shape=(1, 16), swizzled_scales=True)),
    ]
    texts = {json.dumps(scheme.as_dict(), sort_keys=True) for scheme in schemes}
    assert len(texts) == len(schemes)
