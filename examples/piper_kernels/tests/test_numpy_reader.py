import importlib.util
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

SCRIPT = Path(__file__).resolve().parents[1] / "numpy_reader.py"


@pytest.fixture(scope="module")
def reader():
    spec = importlib.util.spec_from_file_location("numpy_reader", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dense(rows, features, seed=0):
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))


def high_first(weight):
    weight.qdata = swap_packed_pairs(weight.qdata)
    weight.high_first = True
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


def test_every_format_of_the_comfy_layout(reader, tmp_path):
    weights = {f"{name}.weight": make() for name, make in MATRICES.items()}
    save_quantized(weights, tmp_path / "w.safetensors", layout="comfy")
    assert_reads(reader, weights, tmp_path / "w.safetensors")


def test_every_e4m3_byte(reader):
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(reader.E4M3, expected)


def test_dense_tensors(reader, tmp_path):
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "int": torch.arange(4),
        "mask": torch.tensor([True, False]),
    }
    save_quantized(tensors, tmp_path / "w.safetensors")
    arrays = reader.read_weights(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(arrays["bf16"], tensors["bf16"].float().numpy())
    np.testing.assert_array_equal(arrays["int"], np.arange(4))
    np.testing.assert_array_equal(arrays["mask"], [True, False])


@pytest.mark.parametrize("change", [-1, 1])
def test_incomplete_files_are_refused(reader, tmp_path, change):
    path = tmp_path / "w.safetensors"
    save_quantized({"w": torch.ones(3)}, path)
    raw = path.read_bytes()
    path.write_bytes(raw[:change] if change < 0 else raw + b"\0")
    with pytest.raises(ValueError, match="truncated or has trailing bytes"):
        reader.read_weights(path)


def test_the_script_runs_without_torch(tmp_path):
    save_quantized({"w": MATRICES["convrot-nvfp4"]()}, tmp_path / "w.safetensors")
    code = (
        "import runpy, sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'safetensors', 'piper_kernels')))\n"
        f"sys.argv = ['numpy_reader.py', {str(tmp_path / 'w.safetensors')!r}]\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("w: float32 [130, 192], largest ")
