import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.io import (
    RowQuantizedWeight,
    WeightFileError,
    load_quantized,
    quantize_int8,
    save_quantized,
)

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


@pytest.mark.parametrize("name", COMFY)
def test_round_trip(weights, path, name, assert_same_weight):
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
        pytest.warns(UserWarning, match="read as int8_tensorwise"),
    ):
        weight = load_quantized(path)["m.weight"]
    assert type(weight) is ConvRotInt8Tensor
    assert weight.group_size == 256
    assert torch.equal(weight.qdata, tensors["m.weight"])


@pytest.mark.parametrize(
    ("marker", "match"),
    [
        ({"format": "int7"}, "unknown comfy_quant format 'int7'"),
        ({"format": "mxfp8"}, "reads int8_tensorwise, float8_e4m3fn, nvfp4"),
        ({}, "format None"),
        ({"format": 8}, "format 8"),
        (b"not json", "no JSON"),
        (b"\xff\xff", "no JSON"),
        ([1], "JSON object"),
        ({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 32}, "group size"),
        ({"format": "int8_tensorwise", "logical_dtype": "int8"}, "int8"),
        ({"format": "float8_e4m3fn"}, "qdata must be torch.float8_e4m3fn"),
        ({"format": "nvfp4"}, "NVFP4 qdata must be uint8"),
    ],
)
def test_markers_that_are_refused(path, marker, match):
    save_file(marked(marker), path)
    with pytest.raises(WeightFileError, match=match) as caught:
        load_quantized(path)
    assert "m." in str(caught.value)


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
