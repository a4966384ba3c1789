"""What a file says about its weights: contradictions, missing parts and newer layouts are named."""

import json

import pytest
import torch

from piper_kernels.weights.io import (
    WeightFileError,
    load_quantized,
)

INT8 = {"format": "convrot_int8", "shape": [2, 16], "logical_dtype": "float32", "group_size": 16}


def write_described(path, described, tensors, version=1):
    from safetensors.torch import save_file

    entry = json.dumps({"version": version, "weights": described})
    save_file(tensors, path, metadata={"piper_kernels.weights": entry})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": "int2"}, "unknown weight format 'int2'"),
        ({"format": None}, "unknown weight format None"),
        ({"shape": [2, 32]}, "shape"),
        ({"shape": 32}, "says shape 32"),
        ({"logical_dtype": "float64"}, "float64"),
        ({"group_size": 64}, "not divisible by group size"),
        ({"group_size": None}, "group_size must be int, got None"),
        ({"group_size": 16.0}, "group_size must be int, got 16.0"),
        ({"group_size": 32}, "group size must be one of"),
        ({"transposed": "no"}, "transposed must be bool, got 'no'"),
        ({"zero_point": 3}, "zero_point"),
    ],
)
def test_contradictions_name_the_weight(path, change, match):
    tensors = {"w.qdata": torch.zeros(2, 16, dtype=torch.int8), "w.scale": torch.ones(2, 1)}
    write_described(path, {"w": INT8 | change}, tensors)
    with pytest.raises(WeightFileError, match=match) as caught:
        load_quantized(path)
    assert str(caught.value).startswith("w: ")


def test_missing_keys_and_tensors_are_named(path):
    codes = torch.zeros(2, 16, dtype=torch.int8)
    write_described(path, {"w": INT8}, {"w.qdata": codes})
    with pytest.raises(WeightFileError, match="lacks scale"):
        load_quantized(path)
    without = {key: value for key, value in INT8.items() if key != "group_size"}
    write_described(path, {"w": without}, {"w.qdata": codes, "w.scale": torch.ones(2, 1)})
    with pytest.raises(WeightFileError, match="missing 'group_size'"):
        load_quantized(path)
    wrong = INT8 | {"format": "float8_e4m3_rowwise"}
    del wrong["group_size"]
    write_described(path, {"w": wrong}, {"w.qdata": codes, "w.scale": torch.ones(2, 1)})
    with pytest.raises(WeightFileError, match=r"float8_e4m3fn, got torch\.int8"):
        load_quantized(path)


def test_newer_layouts_are_refused(path):
    write_described(path, {}, {"x": torch.zeros(1)}, version=2)
    with pytest.raises(WeightFileError, match="layout version 2"):
        load_quantized(path)


@pytest.mark.parametrize("entry", ["", "[]", '{"version": 1}', '{"version": 1, "weights": [1]}'])
def test_malformed_descriptions(path, entry):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, path, metadata={"piper_kernels.weights": entry})
    with pytest.raises(WeightFileError, match=r"piper_kernels\.weights"):
        load_quantized(path)
