import json

import pytest
import torch
from safetensors.torch import save_file

from phyai_quant import QuantConfigError, load_quant_plan
from phyai_quant.importers.markers import METADATA_KEY, read_markers

INT8 = {"format": "int8_tensorwise", "per_row": True}


def bytes_of(value):
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return torch.tensor(list(raw), dtype=torch.uint8)


def layer(name, marker=INT8):
    tensors = {
        f"{name}.weight": torch.ones(3, 16, dtype=torch.int8),
        f"{name}.weight_scale": torch.ones(3, 1),
    }
    return tensors if marker is None else {**tensors, f"{name}.comfy_quant": bytes_of(marker)}


def header_entry(layers):
    return {METADATA_KEY: json.dumps({"format_version": "1.0", "layers": layers})}


@pytest.mark.parametrize("place", ["tensor", "header", "both"])
def test_markers_are_found_in_tensors_and_headers(tmp_path, place):
    tensors = layer("a.b", None if place == "header" else INT8)
    metadata = None if place == "tensor" else header_entry({"a.b": INT8})
    save_file({**tensors, "norm.weight": torch.ones(3)}, tmp_path / "m.safetensors", metadata)
    (found,) = read_markers([tmp_path / "m.safetensors"])
    assert found.module == "a.b"
    assert found.section.data == INT8
    assert found.tensors["weight"].shape == (3, 16)
    assert found.tensors["weight_scale"].dtype == "F32"
    for path in (tmp_path, tmp_path / "m.safetensors"):
        plan = load_quant_plan(path)
        assert plan.resolve("a.b").weight.dtype == "int8"
        assert plan.resolve("norm") is None


def test_an_absent_version_is_warned_of(tmp_path):
    metadata = {METADATA_KEY: json.dumps({"layers": {"a.b": INT8}})}
    save_file(layer("a.b", None), tmp_path / "m.safetensors", metadata)
    with pytest.warns(UserWarning, match=r"no format_version; 1\.0 is assumed"):
        assert load_quant_plan(tmp_path).resolve("a.b") is not None


def test_a_layer_may_lie_in_two_shards(tmp_path):
    tensors = layer("a.b")
    scale = {"a.b.weight_scale": tensors.pop("a.b.weight_scale")}
    save_file(tensors, tmp_path / "model-00001-of-00002.safetensors")
    save_file(scale, tmp_path / "model-00002-of-00002.safetensors")
    assert load_quant_plan(tmp_path).resolve("a.b").weight.granularity == "per_channel"


def test_files_without_markers_declare_nothing(tmp_path):
    save_file({"a.weight": torch.ones(2)}, tmp_path / "m.safetensors")
    assert load_quant_plan(tmp_path) is None
    assert load_quant_plan(tmp_path / "m.safetensors") is None


@pytest.mark.parametrize(
    ("tensors", "metadata", "text"),
    [
        (layer("a", INT8), header_entry({"a": {"format": "nvfp4"}}), "contradict each other"),
        (layer("a", b"{"), None, "a.comfy_quant: not a valid JSON file"),
        (layer("a", b"\xff"), None, "a.comfy_quant: the marker cannot be read"),
        (layer("a", b'{"format": 1, "format": 2}'), None, "key 'format' stands twice"),
        (layer("a", [1]), None, "a: expected an object, got [1]"),
        ({"a.comfy_quant": torch.ones(2)}, None, "a.comfy_quant: the marker must be U8, not 'F32'"),
        ({"a.comfy_quant": torch.ones(70_000, dtype=torch.uint8)}, None, "70000 bytes"),
        ({"comfy_quant": bytes_of(INT8)}, None, "comfy_quant names no layer"),
        (layer("a", None), {METADATA_KEY: "[]"}, '_metadata: expected {"layers"'),
        (layer("a", None), {METADATA_KEY: "{"}, "_metadata: not a valid JSON file"),
        (
            layer("a", None),
            {METADATA_KEY: '{"layers": {}, "format_version": "2"}'},
            "format_version '2' is not allowed; allowed: 1.0",
        ),
        (layer("a", None), header_entry([]), '_metadata: expected {"layers"'),
        (layer("a", None), header_entry({"a": 3}), "a: expected an object, got 3"),
        (layer("a", None), header_entry({"": {}}), "comfy_quant names no layer"),
        (layer("a", None), header_entry({"b": INT8}), "the file lacks b.weight"),
    ],
)
def test_bad_markers_name_file_and_tensor(tmp_path, tensors, metadata, text):
    save_file(tensors, tmp_path / "m.safetensors", metadata)
    with pytest.raises(QuantConfigError) as error:
        load_quant_plan(tmp_path)
    assert text in str(error.value)
    assert str(tmp_path / "m.safetensors") in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        b"PK\x03\x04 a zip archive",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{]",
        (10).to_bytes(8, "little") + b'{"a": "b"}',
        (9).to_bytes(8, "little") + b'{"a": 13}',
        (19).to_bytes(8, "little") + b'{"__metadata__": 3}',
    ],
)
def test_other_files_are_left_to_the_loader_with_a_warning(tmp_path, content):
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.warns(UserWarning, match=r"m\.safetensors: not looked into for quantized layers"):
        assert load_quant_plan(tmp_path) is None


def raw_file(path, entry):
    header = json.dumps({"a.comfy_quant": entry, "a.weight": {"dtype": 3, "shape": [1]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"{}")


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}, "the file ends before it"),
        ({"dtype": "U8", "shape": [2], "data_offsets": [2, 0]}, "-2 bytes"),
        ({"dtype": "U8", "shape": [2], "data_offsets": None}, "cannot be read"),
        ({"dtype": "U8", "shape": [2]}, "cannot be read: 'data_offsets'"),
        ({"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "a.weight: no valid dtype and"),
    ],
)
def test_broken_headers_are_refused(tmp_path, entry, text):
    raw_file(tmp_path / "m.safetensors", entry)
    with pytest.raises(QuantConfigError) as error:
        load_quant_plan(tmp_path)
    assert text in str(error.value)


def test_other_single_files_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(QuantConfigError, match="expected a checkpoint directory or a"):
        load_quant_plan(tmp_path / "config.json")
