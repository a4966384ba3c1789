"""Files in layout comfy, from the writer of piper-kernels to weights on a layer."""

import pytest
import torch
from safetensors.torch import load_file

from phyai_quant import load_quant_plan, materialize
from phyai_quant.checkpoint import check_unquantized_dtypes
from phyai_quant.specs.base import AllocationRequest
from phyai_quant.specs.loading import check_complete
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.io import RowQuantizedWeight, load_quantized, save_quantized
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

LAYER = "blocks.0.proj"
MICRO = {"compute_per_tensor_scale": True, "is_swizzled_scales": True}


def dense(rows, features):
    generator = torch.Generator().manual_seed(rows * 1000 + features)
    return torch.randn(rows, features, generator=generator)


MAKERS = {
    "int8 rows": lambda: RowQuantizedWeight.from_hp(dense(5, 23)),
    "int8 rows, static": lambda: RowQuantizedWeight.from_hp(
        dense(5, 23), act_per_tensor_scale=torch.tensor(0.5)
    ),
    "fp8 rows": lambda: RowQuantizedWeight.from_hp(dense(1, 48), storage_dtype=torch.float8_e4m3fn),
    "rotated int8": lambda: ConvRotInt8Tensor.from_hp(dense(7, 64), group_size=16),
    "rotated int8, static": lambda: ConvRotInt8Tensor.from_hp(
        dense(7, 64), group_size=64, act_per_tensor_scale=torch.tensor(0.25)
    ),
    "nvfp4": lambda: PiperNVFP4Tensor.from_hp(dense(131, 80), **MICRO),
    "nvfp4 of whole tiles": lambda: PiperNVFP4Tensor.from_hp(dense(128, 64), **MICRO),
    "nvfp4, static": lambda: PiperNVFP4Tensor.from_hp(
        dense(6, 32), act_per_tensor_scale=torch.tensor(0.125), **MICRO
    ),
    "rotated nvfp4": lambda: ConvRotNVFP4Tensor.from_hp(dense(130, 128), group_size=64, **MICRO),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_layer_holds_what_the_file_means(name, tmp_path, make_layer):
    file = tmp_path / "model.safetensors"
    bias = torch.ones(3)
    save_quantized({f"{LAYER}.weight": MAKERS[name](), "norm.bias": bias}, file, layout="comfy")
    plan = load_quant_plan(tmp_path)
    scheme = plan.resolve(LAYER, "Linear")
    assert (scheme.input is not None) is (name.startswith("rotated int8") or "static" in name)
    tensors = load_file(file)
    check_unquantized_dtypes({key: tensor.dtype for key, tensor in tensors.items()}, plan)

    meant = load_quantized(file)[f"{LAYER}.weight"]
    layer, spec = make_layer(LAYER), materialize(scheme)
    spec.allocate(layer, AllocationRequest(tuple(meant.shape), torch.float32))
    for key, tensor in tensors.items():
        module, _, tensor_name = key.rpartition(".")
        if module == LAYER and tensor_name != "comfy_quant":
            spec.load_weight(layer, tensor_name, tensor, None)
    check_complete(layer)
    spec.process_after_loading(layer)
    expected = meant.dequantize(torch.float32)
    torch.testing.assert_close(spec.dequantize_weight(layer), expected, rtol=1e-6, atol=1e-6)
