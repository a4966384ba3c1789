import pytest

from phyai_quant import QuantConfigError, TensorQuant
from phyai_quant.importers.base import Section
from phyai_quant.importers.tensor_args import read_kv_cache, read_tensor_args

INT4 = {"num_bits": 4, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
FP4 = {"num_bits": 4, "type": "float"}


def read(args, *, is_input=False):
    return read_tensor_args(Section(args, "config.json", "weights"), is_input=is_input)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"num_bits": 8}, TensorQuant("int8", "per_tensor")),
        ({"strategy": "channel"}, TensorQuant("int8", "per_channel")),
        ({**FP8, "strategy": "tensor"}, TensorQuant("fp8_e4m3", "per_tensor")),
        (
            {**INT4, "strategy": "group", "group_size": 128},
            TensorQuant("int4", "block", block_shape=(1, 128)),
        ),
        ({**INT4, "group_size": 64}, TensorQuant("int4", "block", block_shape=(1, 64))),
        ({**INT4, "group_size": -1}, TensorQuant("int4", "per_channel")),
        ({**INT4, "strategy": "group", "group_size": -1}, TensorQuant("int4", "per_channel")),
        ({**INT4, "strategy": "channel", "group_size": -1}, TensorQuant("int4", "per_channel")),
        ({**FP8, "strategy": "tensor", "group_size": 0}, TensorQuant("fp8_e4m3", "per_tensor")),
        (
            {**FP8, "strategy": "block", "block_structure": "128x64"},
            TensorQuant("fp8_e4m3", "block", block_shape=(128, 64)),
        ),
        (
            {**FP8, "block_structure": [128, 128]},
            TensorQuant("fp8_e4m3", "block", block_shape=(128, 128)),
        ),
        (
            {**FP4, "strategy": "tensor_group", "group_size": 16},
            TensorQuant("nvfp4", "block", micro_scaled=True, block_shape=(1, 16)),
        ),
        (
            {**FP4, "strategy": "group", "group_size": 32},
            TensorQuant("mxfp4", "block", micro_scaled=True, block_shape=(1, 32)),
        ),
        (
            {**FP8, "group_size": 32, "scale_dtype": "torch.uint8"},
            TensorQuant("fp8_e4m3", "block", micro_scaled=True, block_shape=(1, 32)),
        ),
        ({**FP8, "group_size": 32}, TensorQuant("fp8_e4m3", "block", block_shape=(1, 32))),
        (
            {**INT4, "group_size": 128, "actorder": True},
            TensorQuant("int4", "block", block_shape=(1, 128), act_order=True),
        ),
        (
            {**INT4, "group_size": 128, "actorder": "dynamic"},
            TensorQuant("int4", "block", block_shape=(1, 128), act_order=True),
        ),
        (
            {**INT4, "group_size": 128, "actorder": "weight"},
            TensorQuant("int4", "block", block_shape=(1, 128)),
        ),
        (
            {**INT4, "group_size": 128, "actorder": False, "observer": "minmax"},
            TensorQuant("int4", "block", block_shape=(1, 128)),
        ),
        (
            {"strategy": None, "group_size": None, "block_structure": None, "actorder": None},
            TensorQuant("int8", "per_tensor"),
        ),
    ],
)
def test_weights(args, expected):
    assert read(args) == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            {**FP8, "strategy": "token", "dynamic": True},
            TensorQuant("fp8_e4m3", "per_channel", dynamic=True),
        ),
        ({**FP8, "strategy": "tensor"}, TensorQuant("fp8_e4m3", "per_tensor")),
        (
            {**FP8, "strategy": "group", "group_size": 128, "dynamic": True},
            TensorQuant("fp8_e4m3", "block", dynamic=True, block_shape=(1, 128)),
        ),
        (
            {**FP4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
            TensorQuant("nvfp4", "block", dynamic=True, micro_scaled=True, block_shape=(1, 16)),
        ),
    ],
)
def test_inputs(args, expected):
    assert read(args, is_input=True) == expected


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"strategy": "tensor", "group_size": 128}, "strategy 'tensor' and group_size 128"),
        ({"strategy": "tensor", "group_size": -1}, "strategy 'tensor' and group_size -1"),
        ({"strategy": "channel", "group_size": 64}, "strategy 'channel' and group_size 64"),
        ({"strategy": "group"}, "strategy 'group' needs a positive group_size, got None"),
        ({**FP4, "strategy": "tensor_group", "group_size": -1}, "needs a positive group_size"),
        ({"group_size": -2}, "group_size: -2 is not allowed"),
        ({"group_size": True}, "group_size: True is not an integer"),
        ({"strategy": "block"}, "strategy 'block' and block_structure None contradict"),
        (
            {"strategy": "channel", "block_structure": [128, 128]},
            "strategy 'channel' and block_str",
        ),
        ({"strategy": "row"}, "strategy: 'row' is not allowed; allowed: tensor, channel, group"),
        ({"strategy": "token"}, "strategy: 'token' is not allowed for a weight"),
        ({"strategy": "attn_head"}, "'attn_head' is not allowed for a linear layer"),
        ({"num_bits": 3}, "type 'int' with num_bits 3 is not supported; supported: float 8"),
        ({**FP4, "group_size": 64}, "type 'float' with num_bits 4 with group_size 64"),
        ({"type": "fp"}, "type: 'fp' is not allowed; allowed: int, float"),
        ({**FP8, "symmetric": False}, "symmetric: false is not allowed for fp8_e4m3; it has no"),
        ({"symmetric": "no"}, "symmetric: 'no' is not allowed; allowed: true, false"),
        ({}, "is empty; give num_bits, type and strategy, or null for unquantized"),
        ({"num_bits": 0}, "type 'int' with num_bits 0 is not supported"),
        ({"num_bits": 8.0}, "num_bits: 8.0 is not an integer"),
        ({**FP8, "group_size": 32, "scale_dtype": 3}, "scale_dtype: 3 is not allowed"),
        ({**FP8, "scale_dtype": "torch.int4"}, "scale_dtype: 'torch.int4' is not allowed; allowed"),
        ({"zp_dtype": []}, "zp_dtype: [] is not allowed"),
        ({**FP8, "block_structure": ["128", "128"]}, "['128', '128'] is not two positive sizes"),
        ({**FP8, "block_structure": "128x-1"}, "'128x-1' is not two positive sizes"),
        ({"dynamic": True}, "dynamic: true is not allowed for a weight"),
        ({"dynamic": "local"}, "dynamic: 'local' is allowed for nvfp4 activations only"),
        ({"dynamic": 1}, "dynamic: 1 is not allowed; allowed: true, false"),
        (
            {"group_size": 128, "actorder": "sorted"},
            "actorder: 'sorted' is not allowed; allowed: null, true, group, weight, static, dyn",
        ),
        ({"group_size": 128, "actorder": 3}, "actorder: 3 is not allowed"),
        ({"strategy": "channel", "actorder": True}, "actorder 'group' and strategy 'channel'"),
        ({"bits": 8}, "bits: unknown key; known: num_bits"),
        ({**FP8, "block_structure": "128"}, "'128' is not two positive sizes"),
    ],
)
def test_bad_arguments_name_their_key(args, text):
    with pytest.raises(QuantConfigError) as error:
        read(args)
    assert text in str(error.value)
    assert str(error.value).startswith("config.json: weights")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({**FP8, "block_structure": [128, 128]}, "'block' is not allowed for an activation"),
        ({**INT4, "strategy": "token"}, "num_bits: 4-bit integer activations are not supported"),
        (
            {**INT4, "num_bits": 8, "group_size": 64, "actorder": "group"},
            "actorder: is not allowed",
        ),
    ],
)
def test_bad_inputs_name_their_key(args, text):
    with pytest.raises(QuantConfigError) as error:
        read(args, is_input=True)
    assert text in str(error.value)


def test_integers_may_have_zero_points():
    args = {**INT4, "group_size": 128, "symmetric": False}
    assert read(args) == TensorQuant("int4", "block", symmetric=False, block_shape=(1, 128))
    token = read({"strategy": "token", "symmetric": False, "dynamic": True}, is_input=True)
    assert token == TensorQuant("int8", "per_channel", symmetric=False, dynamic=True)


def test_long_and_deep_values_are_cut_in_messages():
    deep = [[[[[[[[["deepest"]]]]]]]]]
    for value in (["x" * 50] * 10_000, deep):
        with pytest.raises(QuantConfigError) as error:
            read({"strategy": value})
        assert len(str(error.value)) < 1000
        assert "deepest" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("FP8", TensorQuant("fp8_e4m3", "per_tensor")),
        ({**FP8, "strategy": "tensor"}, TensorQuant("fp8_e4m3", "per_tensor")),
    ],
)
def test_kv_cache(value, expected):
    assert read_kv_cache(Section({"kv_cache_scheme": value}, "config.json")) == expected


def test_kv_cache_names_of_other_writers():
    config = Section({"kv_cache_scheme": "static"}, "config.json")
    expected = TensorQuant("fp8_e4m3", "per_tensor")
    assert read_kv_cache(config, ("fp8", "static")) == expected
    with pytest.raises(QuantConfigError, match="'static' is not allowed; allowed: FP8 or an obj"):
        read_kv_cache(config)


def test_kv_cache_names_are_closed():
    with pytest.raises(QuantConfigError, match="kv_cache_scheme: 'int8' is not allowed"):
        read_kv_cache(Section({"kv_cache_scheme": "int8"}, "config.json"))
