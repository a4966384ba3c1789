import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.io import RowQuantizedWeight, save_quantized
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
from piper_kernels.weights.validate import Check, Finding, validate_file, validate_state_dict
from piper_kernels.weights.validate.__main__ import main


def make_int8(rows=5):
    return ConvRotInt8Tensor.from_hp(torch.randn(rows, 64), group_size=16)


def make_nvfp4(rows=130, swizzled=True, **options):
    return PiperNVFP4Tensor.from_hp(
        torch.randn(rows, 80),
        compute_per_tensor_scale=True,
        is_swizzled_scales=swizzled,
        **options,
    )


def sound():
    return {
        "int8": make_int8(),
        "static": ConvRotInt8Tensor.from_hp(
            torch.randn(3, 64), group_size=64, act_per_tensor_scale=torch.tensor(0.5)
        ),
        "conv": ConvRotInt8Tensor.from_hp(torch.randn(2, 64, 3, 3, 3), group_size=64),
        "transposed": make_int8().t(),
        "nvfp4": make_nvfp4(),
        "nvfp4-t": make_nvfp4().t(),
        "plain": make_nvfp4(swizzled=False),
        "experts": PiperNVFP4Tensor.from_hp(torch.randn(2, 128, 64), is_swizzled_scales=True),
        "rotated": ConvRotNVFP4Tensor.from_hp(torch.randn(7, 64), group_size=64),
        "row8": RowQuantizedWeight.from_hp(torch.zeros(3, 8)),
        "fp8": RowQuantizedWeight.from_hp(torch.randn(3, 8), storage_dtype=torch.float8_e4m3fn),
        "dense": torch.randn(4, 4),
        "index": torch.arange(3),
        "mask": torch.tensor([True, False]),
        "bytes": torch.arange(4, dtype=torch.uint8),
    }


def kinds(findings):
    return {(finding.tensor, finding.field, finding.check) for finding in findings}


def test_sound_weights_have_no_findings(tmp_path):
    assert validate_state_dict(sound()) == []
    save_quantized(sound(), tmp_path / "w.safetensors")
    assert validate_file(tmp_path / "w.safetensors") == []
    marked = {"a.weight": make_int8(), "b.weight": make_nvfp4(), "b.bias": torch.zeros(130)}
    save_quantized(marked, tmp_path / "c.safetensors", layout="comfy")
    assert validate_file(tmp_path / "c.safetensors") == []


BAD = [
    (float("nan"), Check.NAN),
    (float("inf"), Check.INFINITE),
    (float("-inf"), Check.INFINITE),
    (0.0, Check.ZERO),
    (-0.5, Check.NEGATIVE),
]


@pytest.mark.parametrize(("value", "check"), BAD)
def test_bad_row_scales(value, check):
    weight = make_int8()
    weight.scale[3] = value
    findings = validate_state_dict({"w": weight})
    assert ("w", "scale", check) in kinds(findings)
    (finding,) = [finding for finding in findings if finding.check is check]
    assert finding.message == f"1 of 5 values are {check}, first at [3, 0]"


@pytest.mark.parametrize(("value", "check"), BAD)
@pytest.mark.parametrize("field", ["act_per_tensor_scale", "per_tensor_scale"])
def test_bad_scalars(value, check, field):
    weight = make_nvfp4(act_per_tensor_scale=torch.tensor(1.0))
    getattr(weight, field).fill_(value)
    assert ("w", field, check) in kinds(validate_state_dict({"w": weight}))


@pytest.mark.parametrize(
    ("byte", "check"),
    [(0x7F, Check.NAN), (0xFF, Check.NAN), (0, Check.ZERO), (0x88, Check.NEGATIVE)],
)
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_bad_block_scales(byte, check, swizzled, transposed):
    weight = make_nvfp4(swizzled=swizzled)
    # Row 129, block 4. Swizzled: second row tile, second column tile, 32 x 16 bytes each.
    place = (3 * 32 + 1) * 16 if swizzled else 129 * 5 + 4
    weight.scale.view(torch.uint8).view(-1)[place] = byte
    weight = weight.t() if transposed else weight
    (finding,) = validate_state_dict({"w": weight})
    assert (finding.tensor, finding.field, finding.check) == ("w", "scale", check)
    assert "first at [129, 4]" in finding.message


def test_padding_must_be_zero():
    weight = make_nvfp4()
    weight.scale.view(torch.uint8).view(-1)[-1] = 0x7F
    (finding,) = validate_state_dict({"w": weight})
    assert finding.check is Check.PADDING
    assert "1 bytes outside of the 130 x 80 matrix" in finding.message


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_bytes_in_fp8_codes(byte):
    weight = RowQuantizedWeight.from_hp(torch.randn(3, 8), storage_dtype=torch.float8_e4m3fn)
    weight.qdata.view(torch.uint8)[2, 5] = byte
    (finding,) = validate_state_dict({"w": weight})
    assert finding == Finding(
        "w", "qdata", Check.NAN, "1 of 24 values are nan, first at [2, 5] (bytes 0x7F and 0xFF)"
    )


def test_values_beyond_the_first_chunk(monkeypatch):
    monkeypatch.setattr("piper_kernels.weights.validate._contents._CHUNK", 7)
    tensor = torch.zeros(5, 6)
    tensor[3, 4] = tensor[4, 5] = float("inf")
    tensor[0, 0] = float("nan")
    messages = [finding.message for finding in validate_state_dict({"x": tensor})]
    assert messages == [
        "1 of 30 values are nan, first at [0, 0]",
        "2 of 30 values are infinite, first at [3, 4]",
    ]


def test_storage_changed_after_construction():
    int8, nvfp4 = make_int8(), make_nvfp4()
    int8.scale = torch.ones(4, 1)
    nvfp4.scale = nvfp4.scale[:32]
    static = make_int8()
    static.act_per_tensor_scale = torch.ones(2)
    findings = validate_state_dict({"i": int8, "n": nvfp4, "s": static})
    assert kinds(findings) == {(name, "", Check.STORAGE) for name in "ins"}


def test_static_input_quantization_needs_a_scale():
    kwargs = QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=True)
    (finding,) = validate_state_dict({"w": make_nvfp4(act_quant_kwargs=kwargs)})
    assert finding.check is Check.STORAGE
    assert finding.field == "act_per_tensor_scale"


def test_meta_tensors_have_no_contents():
    assert validate_state_dict({n: value.to("meta") for n, value in sound().items()}) == []


def test_codes_without_a_description():
    tensors = {
        "a.weight": torch.zeros(2, 4, dtype=torch.int8),
        "a.weight_scale": torch.ones(2, 1),
        "b.weight": torch.zeros(2, 4, dtype=torch.uint8),
        "b.weight_scale": torch.ones(2, 1),
        "c": torch.zeros(2).to(torch.float8_e5m2),
        "table": torch.zeros(2, dtype=torch.uint8),
    }
    assert kinds(validate_state_dict(tensors)) == {
        (name, "", Check.UNMARKED)
        for name in ("a.weight", "a.weight_scale", "b.weight", "b.weight_scale", "c")
    }


def test_values_that_are_no_tensors():
    (finding,) = validate_state_dict({"x": [1]})
    assert finding.check is Check.STORAGE


def marker(**settings):
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


def marked(rows=3, features=64, scale=None, **settings):
    return {
        "m.weight": torch.ones(rows, features, dtype=torch.int8),
        "m.weight_scale": torch.ones(rows, 1) if scale is None else scale,
        "m.comfy_quant": marker(**settings),
    }


INT8 = {"format": "int8_tensorwise"}


@pytest.mark.parametrize(
    ("tensors", "check", "match"),
    [
        (marked(per_row=True), Check.MARKER, "no format"),
        (marked(features=256, **INT8, convrot=True), Check.MARKER, "no convrot_groupsize; 256"),
        (marked(**INT8, convrot=True), Check.STORAGE, "256 does not divide 64 features"),
        (
            marked(features=48, **INT8, convrot=True, convrot_groupsize=64),
            Check.MARKER,
            "do not divide",
        ),
        (marked(**INT8, per_row=False), Check.MARKER, "3 scales for 3 rows"),
        (marked(**INT8, per_row=True, scale=torch.tensor(1.0)), Check.MARKER, "1 scales for 3"),
        (marked(format="int9"), Check.STORAGE, "comfy_quant has format 'int9'"),
        (marked(format="float8_e4m3fn"), Check.STORAGE, "torch.float8_e4m3fn"),
        (marked(**INT8, scale=torch.ones(2, 1)), Check.STORAGE, "scale must be float32"),
        (marked(**INT8, convrot=True, convrot_groupsize=8), Check.STORAGE, "convrot_groupsize 8"),
        (marked(**INT8, colour="red"), Check.MARKER, "['colour'] are unknown and ignored"),
        (marked(**INT8) | {"m.comfy_quant": torch.zeros(2)}, Check.MARKER, "must be uint8"),
        ({"m.comfy_quant": marker(**INT8)}, Check.STORAGE, "lacks qdata, scale"),
    ],
)
def test_markers(tensors, check, match):
    findings = validate_state_dict(tensors)
    assert any(finding.check is check and match in finding.message for finding in findings), (
        findings
    )


def test_markers_that_contradict_the_header(tmp_path):
    layers = {"m": {"format": "float8_e4m3fn"}}
    entry = json.dumps({"format_version": "1.0", "layers": layers})
    path = tmp_path / "w.safetensors"
    save_file(marked(**INT8), path, metadata={"_quantization_metadata": entry})
    (finding,) = validate_file(path)
    assert finding.check is Check.MARKER
    assert "contradicts itself" in finding.message


def test_one_bad_weight_does_not_hide_the_others(tmp_path):
    path = tmp_path / "w.safetensors"
    described = {
        "a": {"format": "int3"},
        "b": {"format": "int8_rowwise", "shape": [2, 4], "logical_dtype": "float32"},
    }
    scale = torch.tensor([[1.0], [float("nan")]])
    codes = torch.zeros(2, 4, dtype=torch.int8)
    entry = json.dumps({"version": 1, "weights": described})
    save_file(
        {"b.qdata": codes, "b.scale": scale, "d": torch.tensor([float("inf")])},
        path,
        metadata={"piper_kernels.weights": entry},
    )
    assert kinds(validate_file(path)) == {
        ("a", "", Check.STORAGE),
        ("b", "scale", Check.NAN),
        ("d", "", Check.INFINITE),
    }


@pytest.mark.parametrize(
    "metadata", [{"piper_kernels.weights": "x"}, {"_quantization_metadata": "x"}]
)
def test_malformed_header_entries(tmp_path, metadata):
    path = tmp_path / "w.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata=metadata)
    (finding,) = validate_file(path)
    assert finding.tensor == next(iter(metadata))
    assert finding.check is Check.STORAGE


def test_damaged_file(tmp_path):
    path = tmp_path / "w.safetensors"
    save_quantized({"w": make_int8()}, path)
    path.write_bytes(path.read_bytes() + b"\0")
    (finding,) = validate_file(path)
    assert finding.check is Check.FILE
    assert str(finding).startswith(f"{path}: file: 1 trailing bytes")


def test_command_line(tmp_path, capsys):
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    weight = make_int8()
    save_quantized({"w": weight}, good)
    weight.scale[0] = float("nan")
    save_quantized({"w": weight}, bad)
    assert main([str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: no findings\n"
    assert main([str(good), str(bad)]) == 1
    out = capsys.readouterr().out
    assert f"{bad}: w.scale: nan: 1 of 5 values are nan, first at [0, 0]\n" in out
    assert out.endswith(f"{bad}: 1 finding\n")
    assert main([str(tmp_path / "none"), str(bad)]) == 2
    assert "No such file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as usage:
        main([])
    assert usage.value.code == 2


def test_module_runs_as_a_command(tmp_path):
    path = tmp_path / "w.safetensors"
    save_quantized({"w": torch.tensor([float("nan")])}, path)
    result = subprocess.run(
        [sys.executable, "-m", "piper_kernels.weights.validate", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert result.stdout == (
        f"{path}: w: nan: 1 of 1 values are nan, first at [0]\n{path}: 1 finding\n"
    )


def test_inference_and_files_never_load_the_validation():
    code = """
import sys, tempfile, torch
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.io import load_quantized, save_quantized
from piper_kernels.weights.sharding import shard_quantized_weight

weights = {
    "a": ConvRotInt8Tensor.from_hp(torch.randn(4, 32), group_size=16),
    "b": ConvRotNVFP4Tensor.from_hp(torch.randn(4, 32), group_size=16, is_swizzled_scales=True),
}
with tempfile.TemporaryDirectory() as folder:
    save_quantized(weights, folder + "/w.safetensors")
    for weight in load_quantized(folder + "/w.safetensors").values():
        with torch.no_grad():
            torch.nn.functional.linear(torch.randn(2, 32), weight)
        shard_quantized_weight(weight, dim=0, start=0, length=2)
assert not [name for name in sys.modules if name.startswith("piper_kernels.weights.validate")]
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
