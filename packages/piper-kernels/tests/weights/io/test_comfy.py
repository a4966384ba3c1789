import json
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.io import (
    RowQuantizedWeight,
    WeightFileError,
    load_quantized,
    quantize_int8,
    save_quantized,
)
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

COMFY = ("int8", "int8-static", "nvfp4-high-first", "convrot-nvfp4", "row-int8", "row-fp8")


def bytes_of(marker):
    raw = marker if isinstance(marker, bytes) else json.dumps(marker).encode()
    return torch.tensor(list(raw), dtype=torch.uint8)


def int8_tensors(rows=3, features=64, scale=None):
    return {
        "m.weight": torch.randint(-127, 128, (rows, features), dtype=torch.int8),
        "m.weight_scale": torch.rand(rows, 1) + 0.1 if scale is None else scale,
    }


def marked(marker, **tensors):
    return {**(tensors or int8_tensors()), "m.comfy_quant": bytes_of(marker)}


def rotated(group_size):
    return {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group_size}


@pytest.mark.parametrize("name", COMFY)
@pytest.mark.filterwarnings("error")
def test_round_trip_takes_no_default(weights, path, name, assert_same_weight):
    bias = torch.randn(7)
    save_quantized({"m.0.weight": weights[name], "m.0.bias": bias}, path, layout="comfy")
    loaded = load_quantized(path)
    assert set(loaded) == {"m.0.weight", "m.0.bias"}
    assert_same_weight(loaded["m.0.weight"], weights[name])
    assert torch.equal(loaded["m.0.bias"], bias)


def test_names_and_markers_are_the_documented_ones(weights, path):
    save_quantized({"m.weight": weights["int8-static"], "weight": weights["row-int8"]}, path,
                   layout="comfy")  # fmt: skip
    stored = load_file(path)
    assert set(stored) == {
        *("m.weight", "m.weight_scale", "m.input_scale", "m.comfy_quant"),
        *("weight", "weight_scale", "input_scale", "comfy_quant"),
    }
    rotated = {
        "format": "int8_tensorwise",
        "per_row": True,
        "convrot": True,
        "convrot_groupsize": 64,
        "logical_dtype": "float16",
    }
    plain = {"format": "int8_tensorwise", "per_row": True, "logical_dtype": "bfloat16"}
    assert json.loads(bytes(stored["m.comfy_quant"].tolist())) == rotated
    assert json.loads(bytes(stored["comfy_quant"].tolist())) == plain
    with safe_open(path, framework="pt") as file:
        entry = json.loads(file.metadata()["_quantization_metadata"])
    assert entry == {"format_version": "1.0", "layers": {"m": rotated, "": plain}}


@pytest.mark.parametrize("name", ["int8-transposed", "int8-conv3d", "nvfp4", "nvfp4-full"])
def test_what_the_layout_cannot_hold(weights, path, name):
    with pytest.raises(ValueError, match="use layout piper"):
        save_quantized({"m.weight": weights[name]}, path, layout="comfy")


def test_quantized_names_must_end_in_weight(weights, path):
    with pytest.raises(ValueError, match=r"<module>\.weight"):
        save_quantized({"m.kernel": weights["int8"]}, path, layout="comfy")


def test_group_that_does_not_divide_falls_back_per_layer(path, assert_same_weight):
    layers = {"a.weight": torch.randn(4, 128), "b.weight": torch.randn(4, 96)}
    quantized = {name: quantize_int8(dense, group_size=64) for name, dense in layers.items()}
    assert type(quantized["a.weight"]) is ConvRotInt8Tensor
    assert type(quantized["b.weight"]) is RowQuantizedWeight
    save_quantized(quantized, path, layout="comfy")
    for name, weight in load_quantized(path).items():
        assert_same_weight(weight, quantized[name])
        dense = layers[name]
        assert (weight.dequantize() - dense).norm() < 0.01 * dense.norm()


def test_marker_of_a_group_that_does_not_divide(path):
    tensors = int8_tensors(features=48)
    save_file(marked({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64},
                     **tensors), path)  # fmt: skip
    with pytest.warns(UserWarning, match="do not divide 48 features"):
        weight = load_quantized(path)["m.weight"]
    assert type(weight) is RowQuantizedWeight
    assert torch.equal(weight.qdata, tensors["m.weight"])


def test_legacy_marker_is_read_with_warnings(path):
    tensors = int8_tensors(features=512)
    save_file(marked({"convrot": True, "per_row": True}, **tensors), path)
    with (
        pytest.warns(UserWarning, match="256 is assumed"),
        pytest.warns(UserWarning, match="no format; int8_tensorwise is assumed"),
    ):
        weight = load_quantized(path)["m.weight"]
    assert type(weight) is ConvRotInt8Tensor
    assert weight.group_size == 256
    assert torch.equal(weight.qdata, tensors["m.weight"])


@pytest.mark.parametrize(
    ("marker", "match"),
    [
        ({"format": "int7"}, "comfy_quant has format 'int7', allowed are"),
        ({"format": "mxfp8"}, '"int8_tensorwise", "float8_e4m3fn", "nvfp4", "convrot_nvfp4"; corr'),
        ({}, "has no format, allowed are int8_tensorwise, .*; correct the marker"),
        ({"convrot": False}, "has no format"),
        ({"format": None}, "format None"),
        ({"format": 8}, "format 8"),
        ({"format": ["nvfp4"]}, r"format \['nvfp4'\]"),
        (b"not json", "no JSON"),
        (b"\xff\xff", "no JSON"),
        ([1], "JSON object"),
        (rotated(32), "has convrot_groupsize 32, allowed are 16, 64, 256; correct the marker"),
        (rotated(16.0), "has convrot_groupsize 16.0"),
        (rotated("16"), "has convrot_groupsize '16'"),
        (rotated(None), "has convrot_groupsize None"),
        ({"format": "int8_tensorwise", "convrot_groupsize": 16}, "without convrot.*rotated or not"),
        ({"format": "int8_tensorwise", "convrot": 1}, "has convrot 1, allowed are true, false"),
        ({"format": "int8_tensorwise", "convrot": "no"}, "has convrot 'no'"),
        ({"format": "int8_tensorwise", "convrot": True}, "256 does not divide 64 features; name"),
        ({"format": "int8_tensorwise", "per_row": "yes"}, "has per_row 'yes'"),
        ({"format": "nvfp4", "high_first": 0}, "has high_first 0"),
        (rotated(64) | {"format": "nvfp4"}, "format 'nvfp4' with convrot true; allowed are"),
        (rotated(64) | {"format": "float8_e4m3fn"}, "format 'float8_e4m3fn' with convrot true"),
        ({"format": "convrot_nvfp4", "convrot": False}, "'convrot_nvfp4' with convrot false"),
        (
            {"format": "int8_tensorwise", "logical_dtype": "int8"},
            'logical_dtype \'int8\', allowed.*"float16", "bfloat16", "float32"',
        ),
        ({"format": "int8_tensorwise", "logical_dtype": None}, "logical_dtype None"),
        ({"format": "float8_e4m3fn"}, "qdata must be torch.float8_e4m3fn"),
        ({"format": "nvfp4"}, "NVFP4 qdata must be uint8"),
    ],
)
def test_markers_that_are_refused(path, marker, match):
    save_file(marked(marker), path)
    warnings.simplefilter("ignore")  # Of a marker that lacks other keys too.
    with pytest.raises(WeightFileError, match=match) as caught:
        load_quantized(path)
    assert "m." in str(caught.value)


@pytest.mark.parametrize(
    ("absent", "default", "changed"),
    [
        ("high_first", r"m\.weight: comfy_quant has no high_first; false is assumed", {}),
        ("convrot", r"m\.weight: comfy_quant has no convrot; true is assumed", {}),
        ("convrot_groupsize", "no convrot_groupsize; 256 is assumed", {"group_size": 256}),
        ("logical_dtype", "1 weights name no logical_dtype, m.weight for one; bfloat16 is assumed",
         {"orig_dtype": torch.bfloat16}),
    ],
)  # fmt: skip
def test_keys_that_nvfp4_markers_may_lack(weights, path, absent, default, changed):
    weight = ConvRotNVFP4Tensor.from_hp(torch.randn(3, 256), group_size=64, is_swizzled_scales=True)
    save_quantized({"m.weight": weight}, path, layout="comfy")
    tensors = load_file(path)
    marker = json.loads(bytes(tensors["m.comfy_quant"].tolist()))
    del marker[absent]
    tensors["m.comfy_quant"] = bytes_of(marker)
    save_file(tensors, path)
    with pytest.warns(UserWarning, match=default) as caught:
        loaded = load_quantized(path)["m.weight"]
    assert len(caught) == 1
    assert torch.equal(loaded.qdata, weight.qdata)
    attributes = weight.__tensor_flatten__()[1] | changed
    assert loaded.__tensor_flatten__()[1] == attributes


@pytest.mark.filterwarnings("error")
def test_a_given_logical_dtype_needs_no_warning(path):
    save_file(marked({"format": "int8_tensorwise", "per_row": True}), path)
    weight = load_quantized(path, logical_dtype=torch.bfloat16)["m.weight"]
    assert weight.logical_dtype == torch.bfloat16


def test_a_logical_dtype_that_no_weight_can_have(path):
    save_file(marked({"format": "int8_tensorwise"}), path)
    with pytest.raises(ValueError, match=r"bfloat16 or float32, got torch\.int8"):
        load_quantized(path, logical_dtype=torch.int8)


def test_unknown_keys_are_named(path):
    save_file(marked({"format": "int8_tensorwise", "logical_dtype": "float32", "b": 1, "a": 2}),
              path)  # fmt: skip
    with pytest.warns(UserWarning, match=r"m\.weight: comfy_quant keys \['a', 'b'\] are unknown"):
        load_quantized(path)


@pytest.mark.parametrize("shape", [(-1,), (32, 16), (128, 4)])
def test_shapes_of_block_scales(path, shape):
    weight = PiperNVFP4Tensor.from_hp(torch.randn(128, 64), is_swizzled_scales=True)
    save_quantized({"m.weight": weight}, path, layout="comfy")
    tensors = load_file(path)
    tensors["m.weight_scale"] = tensors["m.weight_scale"].reshape(shape).view(torch.uint8)
    save_file(tensors, path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = load_quantized(path)["m.weight"]
    assert torch.equal(loaded.dequantize(), weight.dequantize())
    messages = [str(item.message) for item in caught]
    if shape == (128, 4):
        assert messages == [
            "m.weight: weight_scale has shape [128, 4] instead of [32, 16], which plain scales "
            "may have too; swizzled is assumed"
        ]
    else:
        assert messages == []


def test_row_scales_must_be_floating_point(path):
    scale = torch.ones(3, 1, dtype=torch.int32)
    save_file(marked({"format": "int8_tensorwise"}, **int8_tensors(scale=scale)), path)
    with pytest.raises(WeightFileError, match=r"m\.weight: weight_scale is torch.int32, allowed"):
        load_quantized(path)


@pytest.mark.parametrize("version", ["2.0", 1, None])
def test_version_of_the_global_metadata(path, version):
    entry = {"format_version": version, "layers": {"m": {"format": "int8_tensorwise"}}}
    save_file(int8_tensors(), path, metadata={"_quantization_metadata": json.dumps(entry)})
    with pytest.raises(WeightFileError, match=r"allowed is '1\.0'; read the file with a newer"):
        load_quantized(path)


def test_marker_of_another_dtype(path):
    save_file({**int8_tensors(), "m.comfy_quant": torch.zeros(3)}, path)
    with pytest.raises(WeightFileError, match="must be uint8"):
        load_quantized(path)


@pytest.mark.parametrize(
    "scale",
    [torch.tensor(0.5), torch.tensor([0.5]), torch.rand(3) + 1, torch.rand(3, 1) + 1,
     torch.tensor([[0.25], [0.5], [1.0]], dtype=torch.bfloat16)],
    ids=["scalar", "one", "flat", "rows", "bf16"],
)  # fmt: skip
def test_scale_shapes_of_other_writers(path, scale):
    tensors = int8_tensors(scale=scale)
    save_file(marked({"format": "int8_tensorwise"}, **tensors), path)
    weight = load_quantized(path, logical_dtype=torch.float32)["m.weight"]
    expected = tensors["m.weight"].float() * scale.float().reshape(-1, 1)
    assert torch.equal(weight.dequantize(), expected)
    assert weight.logical_dtype == torch.float32


def test_input_scale_becomes_a_scalar(path):
    tensors = int8_tensors() | {"m.input_scale": torch.tensor([0.75])}
    marker = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16}
    save_file(marked(marker, **tensors), path)
    weight = load_quantized(path)["m.weight"]
    assert weight.act_per_tensor_scale.shape == ()
    assert weight.act_per_tensor_scale == 0.75
    assert weight.dtype == torch.bfloat16


@pytest.mark.parametrize("lost", ["m.weight", "m.weight_scale"])
def test_missing_parts(path, lost):
    tensors = marked({"format": "int8_tensorwise"})
    del tensors[lost]
    save_file(tensors, path)
    with pytest.raises(WeightFileError, match=r"m\.weight: the file lacks"):
        load_quantized(path)


def test_global_metadata_alone_describes_a_file(path):
    entry = {"layers": {"m": {"format": "int8_tensorwise", "convrot": True,
                              "convrot_groupsize": 16}}}  # fmt: skip
    save_file(int8_tensors(), path, metadata={"_quantization_metadata": json.dumps(entry)})
    with pytest.warns(UserWarning, match=r"no format_version; 1\.0 is assumed"):
        weight = load_quantized(path)["m.weight"]
    assert type(weight) is ConvRotInt8Tensor
    assert weight.group_size == 16


def test_contradicting_markers(path):
    entry = {"layers": {"m": {"format": "float8_e4m3fn"}}}
    save_file(
        marked({"format": "int8_tensorwise"}),
        path,
        metadata={"_quantization_metadata": json.dumps(entry)},
    )
    with pytest.raises(WeightFileError, match="contradicts itself"):
        load_quantized(path)


@pytest.mark.parametrize("entry", ["", "{}", '{"layers": 3}', '{"layers": {"m": 1}}'])
def test_malformed_global_metadata(path, entry):
    save_file(int8_tensors(), path, metadata={"_quantization_metadata": entry})
    with pytest.raises(WeightFileError, match="_quantization_metadata"):
        load_quantized(path)
