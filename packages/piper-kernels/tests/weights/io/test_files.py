import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.io import (
    RowQuantizedWeight,
    WeightFileError,
    load_quantized,
    read_metadata,
    save_quantized,
)
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor


def mapped_ranges(path):
    """Address ranges of this process that map the file."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0] for line in maps if line.endswith(str(path.resolve()))]
    return [tuple(int(end, 16) for end in pair.split("-")) for pair in ranges]


def test_round_trip_of_every_format(named_weight, path, assert_same_weight):
    _, weight = named_weight
    save_quantized({"block.0.weight": weight}, path)
    loaded = load_quantized(path)
    assert list(loaded) == ["block.0.weight"]
    assert_same_weight(loaded["block.0.weight"], weight)


def test_a_model_in_one_file(weights, path, assert_same_weight):
    bias = torch.randn(7)
    save_quantized({**weights, "bias": bias}, path, metadata={"author": "someone"})
    loaded = load_quantized(path)
    assert set(loaded) == {*weights, "bias"}
    for name, weight in weights.items():
        assert_same_weight(loaded[name], weight)
    assert torch.equal(loaded["bias"], bias)
    assert read_metadata(path) == {"author": "someone"}


def test_tensor_names_and_header_are_the_documented_ones(path):
    weight = ConvRotInt8Tensor.from_hp(
        torch.randn(3, 32), group_size=16, act_per_tensor_scale=torch.tensor(0.5)
    )
    nvfp4 = PiperNVFP4Tensor.from_hp(torch.randn(3, 32), compute_per_tensor_scale=True)
    save_quantized({"a": weight, "b": nvfp4, "c": torch.zeros(2)}, path)
    stored = load_file(path)
    assert set(stored) == {
        *("a.qdata", "a.scale", "a.act_per_tensor_scale"),
        *("b.qdata", "b.scale", "b.per_tensor_scale"),
        "c",
    }
    assert stored["a.qdata"].dtype == torch.int8
    assert stored["a.scale"].shape == (3, 1)
    assert stored["b.qdata"].shape == (3, 16)
    assert stored["b.scale"].dtype == torch.float8_e4m3fn
    with safe_open(path, framework="pt") as file:
        entry = json.loads(file.metadata()["piper_kernels.weights"])
    assert entry == {
        "version": 1,
        "weights": {
            "a": {
                "format": "convrot_int8",
                "shape": [3, 32],
                "logical_dtype": "float32",
                "group_size": 16,
            },
            "b": {
                "format": "nvfp4",
                "shape": [3, 32],
                "logical_dtype": "float32",
                "block_size": 16,
                "scale_layout": "plain",
                "high_first": False,
                "use_triton_kernel": False,
            },
        },
    }


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
@pytest.mark.parametrize("layout", ["piper", "comfy"])
def test_loading_aliases_the_mapped_file(path, layout, inner_tensors):
    weights = {
        "i.weight": ConvRotInt8Tensor.from_hp(torch.randn(5, 64), group_size=16),
        "n.weight": ConvRotNVFP4Tensor.from_hp(
            torch.randn(5, 64), group_size=16, is_swizzled_scales=True
        ),
        "r.weight": RowQuantizedWeight.from_hp(torch.randn(5, 7)),
        "f.weight": RowQuantizedWeight.from_hp(
            torch.randn(5, 7), storage_dtype=torch.float8_e4m3fn
        ),
    }
    save_quantized({**weights, "d": torch.randn(9)}, path, layout=layout)
    loaded = load_quantized(path)
    ranges = mapped_ranges(path)
    assert ranges
    tensors = [loaded["d"], *(t for name in weights for t in inner_tensors(loaded[name]).values())]
    assert len(tensors) == 9
    for tensor in tensors:
        assert any(start <= tensor.data_ptr() < end for start, end in ranges)


def test_writing_to_a_loaded_weight_does_not_change_the_file(path):
    weight = ConvRotInt8Tensor.from_hp(torch.randn(4, 32), group_size=16)
    save_quantized({"w": weight}, path)
    before = path.read_bytes()
    loaded = load_quantized(path)["w"]
    loaded.add_(torch.ones(4, 32), rounding_seed=3)
    assert not torch.equal(loaded.dequantize(), weight.dequantize())
    assert path.read_bytes() == before


def test_a_mapped_file_can_be_replaced(path, assert_same_weight):
    first, second = (ConvRotInt8Tensor.from_hp(torch.randn(4, 32), group_size=16) for _ in "ab")
    save_quantized({"w": first}, path)
    loaded = load_quantized(path)["w"]
    save_quantized({"w": second}, path)
    assert_same_weight(loaded, first)
    assert_same_weight(load_quantized(path)["w"], second)


@pytest.mark.parametrize("fault", ["write", "rename"])
def test_a_failed_write_leaves_the_old_file(path, monkeypatch, fault):
    save_quantized({"w": torch.ones(3)}, path)
    before = path.read_bytes()

    def fail(*_args, **_kwargs):
        raise OSError("disk full")

    target = "safetensors.torch.save_file" if fault == "write" else "pathlib.Path.replace"
    monkeypatch.setattr(target, fail)
    with pytest.raises(OSError, match="disk full"):
        save_quantized({"w": torch.zeros(3)}, path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_views_are_written_as_their_values(path):
    base = torch.randn(4, 6, dtype=torch.complex64)
    strided = torch.randn(8, 6)[::2, 1:4]
    tensors = {
        "negative": base.conj().imag,
        "conjugate": base.conj(),
        "transposed": base.real.t(),
        "strided": strided,
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "empty too": torch.zeros(0),
    }
    assert tensors["negative"].is_neg()
    assert tensors["conjugate"].is_conj()
    save_quantized(tensors, path)
    loaded = load_quantized(path)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].is_contiguous()


def test_tensors_that_share_memory_are_all_written(path):
    embedding = torch.randn(4, 8)
    save_quantized({"embed": embedding, "head": embedding, "part": embedding[1:3]}, path)
    loaded = load_quantized(path)
    assert torch.equal(loaded["embed"], embedding)
    assert torch.equal(loaded["head"], embedding)
    assert torch.equal(loaded["part"], embedding[1:3])


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e5m2],
)
def test_dense_tensors_pass_unchanged(path, dtype, same_bytes):
    tensor = torch.arange(24).view(4, 6).to(dtype)
    save_quantized({"x": tensor}, path)
    loaded = load_quantized(path)["x"]
    assert type(loaded) is torch.Tensor
    assert same_bytes(loaded, tensor)


def test_a_state_dict_loads_into_a_meta_module(path):
    source = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16), nn.Linear(32, 8))
    for layer in source:
        layer.weight = nn.Parameter(
            ConvRotInt8Tensor.from_hp(layer.weight.data, group_size=16), requires_grad=False
        )
    save_quantized(source.state_dict(), path)
    with torch.device("meta"):
        target = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16), nn.Linear(32, 8))
    target.load_state_dict(load_quantized(path), assign=True)
    # A model that asks its first parameter must hear a floating dtype.
    assert next(target.parameters()).dtype == torch.bfloat16
    assert all(parameter.is_floating_point() for parameter in target.parameters())
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(target[0](x), source[0](x))


def test_a_merged_adapter_survives_offload(path, assert_same_weight):
    dense = torch.randn(64, 256)
    dense[:, 3] *= 40
    weight = ConvRotInt8Tensor.from_hp(dense, group_size=64)
    up, down = torch.randn(64, 4), torch.randn(4, 256) * 0.1
    weight.addmm_(up, down, alpha=0.5)
    save_quantized({"w": weight}, path)
    loaded = load_quantized(path)["w"]
    assert_same_weight(loaded, weight)
    merged = dense + 0.5 * up @ down
    flat = merged.abs().max() / 127
    plain = (merged / flat).round().clamp(-128, 127) * flat
    error = (loaded.dequantize() - merged).norm()
    assert error < (plain - merged).norm() / 6


def test_weight_shape_is_logical_everywhere(weights):
    assert weights["nvfp4"].shape == (7, 64)
    assert weights["convrot-nvfp4"].shape == (130, 128)
    assert functional.linear(torch.randn(2, 64), weights["nvfp4"].float()).shape == (2, 7)


@pytest.mark.parametrize(
    ("tensors", "options", "error", "match"),
    [
        ({"a": 3}, {}, TypeError, "a: expected a tensor"),
        (
            {"a": torch.zeros(1)},
            {"layout": "x"},
            ValueError,
            "layout is 'x'; allowed: piper, comfy",
        ),
        (
            {"a": torch.zeros(1)},
            {"metadata": {"_quantization_metadata": "x"}},
            ValueError,
            "reserved",
        ),
    ],
)
def test_refused_saves(path, tensors, options, error, match):
    with pytest.raises(error, match=match):
        save_quantized(tensors, path, **options)
    assert not path.exists()


def test_a_missing_folder_is_named(path):
    with pytest.raises(FileNotFoundError, match=r"x\.safetensors cannot be .*no folder .*absent"):
        save_quantized({"a": torch.zeros(1)}, path.parent / "absent" / "x.safetensors")
    assert not (path.parent / "absent").exists()


def test_a_failed_write_names_the_file_and_leaves_nothing(path, monkeypatch):
    from safetensors import SafetensorError

    def fail(_tensors, file, **_options):
        Path(file).write_bytes(b"half")
        raise SafetensorError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match=r"w\.safetensors cannot be written \(no space left"):
        save_quantized({"a": torch.zeros(1)}, path.with_name("w.safetensors"))
    assert not list(path.parent.iterdir())


def test_a_folder_and_another_logical_dtype_are_refused(path):
    save_quantized({"a": torch.zeros(1)}, path)
    with pytest.raises(WeightFileError, match="a folder; name one of the safetensors files"):
        load_quantized(path.parent)
    with pytest.raises(ValueError, match="logical dtype must be float16, bfloat16 or float32"):
        load_quantized(path, logical_dtype=torch.int8)


def test_names_must_not_collide(path):
    weight = RowQuantizedWeight.from_hp(torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"a\.scale.*quantized weight's part"):
        save_quantized({"a": weight, "a.scale": torch.zeros(1)}, path)


def test_other_tensor_subclasses_are_refused(path):
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    with pytest.raises(TypeError, match="NVFP4Tensor has no file format"):
        save_quantized({"a": NVFP4Tensor.to_nvfp4(torch.randn(4, 16))}, path)


def test_missing_file(path):
    with pytest.raises(FileNotFoundError):
        load_quantized(path)


@pytest.mark.gpu
def test_loading_onto_a_device(weights, path, inner_tensors):
    save_quantized({**weights, "d": torch.ones(3)}, path)
    loaded = load_quantized(path, device="cuda")
    assert loaded["d"].device.type == "cuda"
    for name, weight in weights.items():
        for field, tensor in inner_tensors(loaded[name]).items():
            assert tensor.device.type == "cuda", (name, field)
        assert torch.equal(
            inner_tensors(loaded[name])["qdata"].cpu().view(torch.uint8),
            inner_tensors(weight)["qdata"].view(torch.uint8),
        )


def test_without_safetensors_the_error_says_what_to_install(path, monkeypatch):
    save_quantized({"x": torch.zeros(1)}, path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for call in (lambda: load_quantized(path), lambda: save_quantized({}, path)):
        with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
            call()
