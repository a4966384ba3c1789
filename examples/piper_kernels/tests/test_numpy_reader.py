import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.io import RowQuantizedWeight, save_quantized
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
from piper_kernels.weights.nvfp4._layout import swap_packed_pairs

FOLDER = Path(__file__).resolve().parents[1]


def load(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def reader():
    return load("numpy_reader")


@pytest.fixture(scope="module")
def comfy_reader():
    return load("numpy_reader_comfy")


def dense(rows, features, seed=0):
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))


def high_first(weight):
    weight.qdata = swap_packed_pairs(weight.qdata)
    weight.high_first = True
    return weight


def experts():
    """Three experts of 128 rows with swizzled scales and one second level each."""
    source = dense(3 * 128, 80).view(3, 128, 80)
    weight = PiperNVFP4Tensor.from_hp(source, is_swizzled_scales=True)
    weight.per_tensor_scale = torch.tensor([0.5, 2.0, 3.0]).view(3, 1, 1)
    return weight


MATRICES = {
    "int8-16": lambda: ConvRotInt8Tensor.from_hp(dense(3, 48), group_size=16),
    "int8-64": lambda: ConvRotInt8Tensor.from_hp(
        dense(5, 128).bfloat16(), group_size=64, act_per_tensor_scale=torch.tensor(0.5)
    ),
    "int8-256": lambda: ConvRotInt8Tensor.from_hp(dense(2, 512), group_size=256),
    "nvfp4": lambda: PiperNVFP4Tensor.from_hp(
        dense(259, 144), compute_per_tensor_scale=True, is_swizzled_scales=True
    ),
    "nvfp4-one-level": lambda: PiperNVFP4Tensor.from_hp(dense(7, 16), is_swizzled_scales=True),
    "nvfp4-high-first": lambda: high_first(
        PiperNVFP4Tensor.from_hp(dense(7, 80), is_swizzled_scales=True)
    ),
    "convrot-nvfp4": lambda: ConvRotNVFP4Tensor.from_hp(
        dense(130, 192), group_size=64, compute_per_tensor_scale=True, is_swizzled_scales=True
    ),
    "row-int8": lambda: RowQuantizedWeight.from_hp(dense(4, 23)),
    "row-fp8": lambda: RowQuantizedWeight.from_hp(dense(4, 23), storage_dtype=torch.float8_e4m3fn),
}
PIPER_ONLY = {
    "int8-transposed": lambda: MATRICES["int8-16"]().t(),
    "nvfp4-transposed": lambda: MATRICES["nvfp4"]().t(),
    "conv3d": lambda: ConvRotInt8Tensor.from_hp(torch.randn(2, 64, 3, 3, 3), group_size=16),
    "convrot-nvfp4-plain": lambda: ConvRotNVFP4Tensor.from_hp(dense(5, 256), group_size=256),
    "experts": experts,
    "nvfp4-plain": lambda: PiperNVFP4Tensor.from_hp(
        dense(7, 80),
        compute_per_tensor_scale=True,
        act_quant_kwargs=QuantizeTensorToNVFP4Kwargs(use_dynamic_per_tensor_scale=True),
    ),
}


def assert_reads(reader, weights, path):
    arrays = reader.read_weights(path)
    inputs = {name for name in arrays if name.endswith(("act_per_tensor_scale", "input_scale"))}
    assert len(inputs) == 1
    assert arrays.keys() - inputs == weights.keys()
    for name, weight in weights.items():
        expected = weight.dequantize(torch.float32).numpy()
        assert arrays[name].dtype == np.float32
        assert arrays[name].shape == expected.shape
        # Only the summation order of the rotation may differ.
        np.testing.assert_allclose(arrays[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_every_format_of_the_piper_layout(reader, tmp_path):
    weights = {name: make() for name, make in (MATRICES | PIPER_ONLY).items()}
    save_quantized(weights, tmp_path / "w.safetensors")
    assert_reads(reader, weights, tmp_path / "w.safetensors")


def test_every_format_of_the_comfy_layout(comfy_reader, tmp_path):
    weights = {f"{name}.weight": make() for name, make in MATRICES.items()}
    save_quantized(weights, tmp_path / "w.safetensors", layout="comfy")
    assert_reads(comfy_reader, weights, tmp_path / "w.safetensors")


def test_the_comfy_reader_reads_both_layouts(comfy_reader, tmp_path):
    weights = {name: make() for name, make in (MATRICES | PIPER_ONLY).items()}
    save_quantized(weights, tmp_path / "w.safetensors")
    assert_reads(comfy_reader, weights, tmp_path / "w.safetensors")


@pytest.mark.parametrize("shape", [(1, 16), (127, 48), (128, 64), (129, 80), (300, 272)])
@pytest.mark.parametrize("high", [False, True])
def test_two_levels_with_swizzled_scales(reader, comfy_reader, tmp_path, shape, high):
    weight = PiperNVFP4Tensor.from_hp(
        dense(*shape) * 100, compute_per_tensor_scale=True, is_swizzled_scales=True
    )
    weight = high_first(weight) if high else weight
    expected = weight.dequantize(torch.float32).numpy()
    for layout, module in (("piper", reader), ("comfy", comfy_reader)):
        path = tmp_path / f"{layout}.safetensors"
        save_quantized({"m.weight": weight}, path, layout=layout)
        np.testing.assert_array_equal(module.read_weights(path)["m.weight"], expected)


def test_the_readers_stay_short():
    for name in ("numpy_reader.py", "numpy_reader_comfy.py"):
        lines = (FOLDER / name).read_text().splitlines()
        assert len([line for line in lines if line.strip()]) <= 45, name


def test_every_e4m3_byte(reader):
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(reader.E4M3, expected)


def test_dense_tensors(reader, tmp_path):
    tensors = {
        "w": MATRICES["int8-16"](),
        "bf16": torch.randn(3, 5).bfloat16(),
        "int": torch.arange(4),
        "mask": torch.tensor([True, False]),
    }
    save_quantized(tensors, tmp_path / "w.safetensors")
    arrays = reader.read_weights(tmp_path / "w.safetensors")
    bits = arrays["bf16"].astype(np.uint32) << 16
    np.testing.assert_array_equal(bits.view(np.float32), tensors["bf16"].float().numpy())
    np.testing.assert_array_equal(arrays["int"], np.arange(4))
    np.testing.assert_array_equal(arrays["mask"], [True, False])


def test_truncated_files_are_refused(reader, tmp_path):
    path = tmp_path / "w.safetensors"
    save_quantized({"w": MATRICES["int8-16"]()}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TypeError, match="buffer is too small"):
        reader.read_weights(path)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('\\"version\\":1', '\\"version\\":2', "layout version 2, this reads 1"),
        ("convrot_int8", "convrot_int4", "convrot_int4"),
    ],
)
def test_unknown_versions_and_formats_are_refused(reader, tmp_path, old, new, error):
    path = tmp_path / "w.safetensors"
    save_quantized({"w": MATRICES["int8-16"]()}, path)
    raw = path.read_bytes()
    assert raw.count(old.encode()) == 1
    path.write_bytes(raw.replace(old.encode(), new.encode()))
    with pytest.raises((ValueError, KeyError), match=error):
        reader.read_weights(path)


@pytest.mark.parametrize("marker", [
    {"format": "mxfp8"},
    {"format": "nvfp4", "convrot": True, "convrot_groupsize": 16},
    {"format": "int8_tensorwise", "convrot": True},
])  # fmt: skip
def test_unknown_markers_are_refused(comfy_reader, marker):
    with pytest.raises(KeyError):
        comfy_reader.describe(marker)


@pytest.mark.parametrize("layout", ["piper", "comfy"])
def test_the_script_runs_without_torch(tmp_path, layout):
    weights = {"m.weight": MATRICES["convrot-nvfp4"]()}
    save_quantized(weights, tmp_path / "w.safetensors", layout=layout)
    code = (
        "import runpy, sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'safetensors', 'piper_kernels')))\n"
        f"sys.path.insert(0, {str(FOLDER)!r})\n"
        f"sys.argv = ['numpy_reader_comfy.py', {str(tmp_path / 'w.safetensors')!r}]\n"
        f"runpy.run_path({str(FOLDER / 'numpy_reader_comfy.py')!r}, run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("m.weight: float32 [130, 192], largest ")
