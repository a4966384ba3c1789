import json

import pytest

from phyai_quant import QuantConfigError, QuantScheme, TensorQuant
from phyai_quant.importers.base import ConfigSources, LayerMarker, Section, StoredTensor
from phyai_quant.importers.registry import build_plan

LAYER = "model.blocks.0.attn"
TOKEN = TensorQuant("int8", "per_channel", dynamic=True)
N, K = 48, 64
INT8 = {"weight": ("I8", N, K), "weight_scale": ("F32", N, 1)}
FP8 = {"weight": ("F8_E4M3", N, K), "weight_scale": ("F32",)}
NVFP4 = {
    "weight": ("U8", N, K // 2),
    "weight_scale": ("F8_E4M3", 128, 4),
    "weight_scale_2": ("F32",),
}


def marker(data, tensors, module=LAYER, file="model.safetensors"):
    stored = {name: StoredTensor(dtype, tuple(shape)) for name, (dtype, *shape) in tensors.items()}
    return LayerMarker(module, Section(data, file, module), stored)


def read(data, tensors, **kwargs):
    plan = build_plan(ConfigSources(markers=(marker(data, tensors, **kwargs),)))
    return plan.resolve(kwargs.get("module", LAYER))


def micro(**kwargs):
    return TensorQuant("nvfp4", "block", micro_scaled=True, block_shape=(1, 16), **kwargs)


STATIC8 = {"input_scale": ("F32",)}


@pytest.mark.parametrize(
    ("data", "tensors", "scheme"),
    [
        (
            {"format": "int8_tensorwise", "per_row": True, "logical_dtype": "bfloat16"},
            INT8,
            QuantScheme(TensorQuant("int8", "per_channel")),
        ),
        (
            {"format": "int8_tensorwise"},
            {**INT8, **STATIC8, "weight_scale": ("F32",)},
            QuantScheme(TensorQuant("int8", "per_tensor"), TensorQuant("int8", "per_tensor")),
        ),
        (
            {"format": "int8_tensorwise", "per_row": True},
            {**INT8, "weight_scale": ("F32", 1)},
            QuantScheme(TensorQuant("int8", "per_channel")),
        ),
        (
            {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16},
            INT8,
            QuantScheme(TensorQuant("int8", "per_channel", rotation_group=16), TOKEN),
        ),
        (
            {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64},
            {**INT8, **STATIC8},
            QuantScheme(
                TensorQuant("int8", "per_channel", rotation_group=64),
                TensorQuant("int8", "per_tensor"),
            ),
        ),
        ({"format": "float8_e4m3fn"}, FP8, QuantScheme(TensorQuant("fp8_e4m3", "per_tensor"))),
        (
            {"format": "float8_e4m3fn", "convrot": False},
            {**FP8, **STATIC8, "weight_scale": ("F32", N)},
            QuantScheme(
                TensorQuant("fp8_e4m3", "per_channel"), TensorQuant("fp8_e4m3", "per_tensor")
            ),
        ),
        (
            {"format": "nvfp4", "high_first": False},
            NVFP4,
            QuantScheme(micro(swizzled_scales=True)),
        ),
        (
            {
                "format": "convrot_nvfp4",
                "high_first": False,
                "convrot": True,
                "convrot_groupsize": 64,
            },
            {**NVFP4, **STATIC8},
            QuantScheme(micro(swizzled_scales=True, rotation_group=64), micro(dynamic=True)),
        ),
    ],
)
def test_formats(data, tensors, scheme):
    assert read(data, tensors) == scheme


def test_layers_without_a_marker_are_unquantized():
    first = marker({"format": "int8_tensorwise"}, INT8)
    second = marker({"format": "float8_e4m3fn"}, FP8, "model.head", "b.safetensors")
    plan = build_plan(ConfigSources(markers=(first, second)))
    assert plan.resolve(LAYER).weight.dtype == "int8"
    assert plan.resolve("model.head").weight.dtype == "fp8_e4m3"
    assert plan.resolve("model.blocks.1.attn") is None
    assert plan.source == "model.safetensors, b.safetensors"


def test_a_bare_module_name_is_no_suffix():
    plan = build_plan(ConfigSources(markers=(marker({"format": "float8_e4m3fn"}, FP8, "head"),)))
    assert plan.resolve("head") is not None
    assert plan.resolve("model.other.head") is None
    assert plan.resolve("head.fc") is None


@pytest.mark.parametrize(
    ("legacy", "group"),
    [({"convrot": True, "per_row": True, "convrot_groupsize": 16}, 16), ({"per_row": True}, None)],
)
def test_markers_without_a_format_are_int8_with_a_warning(legacy, group):
    with pytest.warns(UserWarning, match="the marker has no format; int8_tensorwise is assumed"):
        scheme = read(legacy, INT8)
    assert scheme.weight.rotation_group == group


@pytest.mark.parametrize(
    ("data", "tensors", "text"),
    [
        (
            {"format": "int8_tensorwise", "convrot": True},
            {**INT8, "weight": ("I8", N, 512)},
            "names no convrot_groupsize; 256 is assumed",
        ),
        (
            {"format": "convrot_nvfp4", "high_first": False},
            {**NVFP4, "weight": ("U8", N, 128)},
            "names no convrot_groupsize; 256 is assumed",
        ),
        ({"format": "nvfp4"}, NVFP4, "names no high_first; false is assumed"),
        ({"format": "float8_e4m3fn", "later": 1}, FP8, "ignoring unknown keys later"),
    ],
)
def test_defaults_are_warned_of(data, tensors, text):
    with pytest.warns(UserWarning, match=text):
        scheme = read(data, tensors)
    rotated = data.get("convrot") or data["format"] == "convrot_nvfp4"
    assert scheme.weight.rotation_group == (256 if rotated else None)


def test_a_rotation_that_does_not_fit_is_plain_int8_with_a_warning():
    data = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
    with pytest.warns(UserWarning, match="groups of 256 do not divide 64 features"):
        scheme = read(data, INT8)
    assert scheme == QuantScheme(TensorQuant("int8", "per_channel"))


I8 = "int8_tensorwise"
E4M3 = "float8_e4m3fn"


@pytest.mark.parametrize(
    ("data", "tensors", "text"),
    [
        ({"format": "mxfp8"}, FP8, ".format: 'mxfp8' is not supported; supported: int8_tensorwise"),
        ({}, INT8, ".format: None is not supported"),
        ({"format": 8}, INT8, ".format: 8 is not allowed"),
        ({"format": I8, "per_row": "yes"}, INT8, ".per_row: 'yes' is not allowed; allowed: true"),
        ({"format": I8, "logical_dtype": 3}, INT8, ".logical_dtype: 3 is not allowed"),
        ({"format": E4M3}, INT8, "'float8_e4m3fn' stores a matrix of F8_E4M3, but the file holds"),
        ({"format": I8}, {**INT8, "weight": ("I8", 2, 3, 3)}, "holds I8 of shape [2, 3, 3]"),
        ({"format": I8}, {"weight": ("I8", N, K)}, f"the file lacks {LAYER}.weight_scale, which"),
        ({"format": I8}, {}, f"the file lacks {LAYER}.weight, which int8_tensorwise needs"),
        ({"format": I8}, {**INT8, "weight_scale": ("F32", 3)}, "weight_scale of shape [3] has"),
        ({"format": "nvfp4"}, {**INT8, "weight": ("U8", 2, 8)}, ".weight_scale_2, which nvfp4"),
        ({"format": "nvfp4", "high_first": True}, NVFP4, ".high_first: true is not supported"),
        ({"format": "nvfp4", "convrot": True}, NVFP4, ".convrot: true and format 'nvfp4' contra"),
        ({"format": E4M3, "convrot": True}, FP8, ".convrot: true and format 'float8_e4m3fn' con"),
        ({"format": "convrot_nvfp4", "convrot": False}, NVFP4, ".convrot: false and format 'conv"),
        ({"format": I8, "convrot_groupsize": 16}, INT8, ".convrot_groupsize: stands without conv"),
        ({"format": I8, "convrot": True}, INT8, ".convrot_groupsize: is missing, and 256 does not"),
        (
            {"format": I8, "convrot": True, "convrot_groupsize": 32},
            INT8,
            ".convrot_groupsize: 32 is not allowed; allowed: 16, 64, 256",
        ),
        (
            {"format": "convrot_nvfp4", "convrot": True, "convrot_groupsize": 0},
            NVFP4,
            ".convrot_groupsize: 0 is not allowed",
        ),
    ],
)
def test_bad_markers_name_file_and_layer(data, tensors, text):
    with pytest.raises(QuantConfigError) as error:
        read(data, tensors)
    assert text in str(error.value)
    assert str(error.value).startswith(f"model.safetensors: {LAYER}")


@pytest.mark.parametrize("method", ["fp8", "gptq"])
def test_a_config_beside_markers_is_a_contradiction(method):
    config = Section({"quant_method": method}, "config.json", "quantization_config")
    sources = ConfigSources(inline=config, markers=(marker({"format": E4M3}, FP8),))
    with pytest.raises(QuantConfigError) as error:
        build_plan(sources)
    assert "config.json: quantization_config" in str(error.value)
    assert "model.safetensors" in str(error.value)


def test_markers_are_json_in_reports():
    plan = build_plan(ConfigSources(markers=(marker({"format": E4M3}, FP8),)))
    assert json.dumps(plan.as_dict())
    assert "model.safetensors" in plan.rules[0].describe()
