"""Tensor subclasses, compilation and serialization."""

import copy
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.io import (
    RowQuantizedWeight,
    WeightFileError,
    load_quantized,
    save_quantized,
)
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

LEVELS = {"compute_per_tensor_scale": True, "is_swizzled_scales": True}
QUANTIZERS = {
    "int8": lambda dense: ConvRotInt8Tensor.from_hp(dense, group_size=64),
    "nvfp4": lambda dense: PiperNVFP4Tensor.from_hp(dense, **LEVELS),
    "convrot-nvfp4": lambda dense: ConvRotNVFP4Tensor.from_hp(dense, group_size=64, **LEVELS),
    "row-int8": RowQuantizedWeight.from_hp,
    "row-fp8": lambda dense: RowQuantizedWeight.from_hp(dense, storage_dtype=torch.float8_e4m3fn),
}
every_format = pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=QUANTIZERS)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sqnr(found, exact):
    """Signal to quantization noise ratio in dB."""
    error = found.double() - exact.double()
    return 10 * math.log10(exact.double().pow(2).sum() / error.pow(2).sum())


@pytest.mark.parametrize("name", ["int8", "nvfp4"])
def test_case_31_copies_between_dense_and_quantized(name):
    """Copying between dense and quantized tensors is defined or names the alternative.

    Handled in piper_kernels.weights.
    """
    dense = normal(64, 64)
    weight, other = (QUANTIZERS[name](normal(64, 64, seed=seed)) for seed in (1, 2))
    assert weight.copy_(other) is weight
    assert torch.equal(weight.dequantize(), other.dequantize())
    before = dense.clone()
    with pytest.raises(NotImplementedError, match=r"dense\.copy_\(weight\.dequantize\(\)\)"):
        dense.copy_(weight)
    with pytest.raises(NotImplementedError, match="from_hp"):
        weight.copy_(dense)
    assert torch.equal(dense, before)
    assert torch.equal(weight.dequantize(), other.dequantize())


@every_format
def test_case_32_zeros_stay_zeros(quantize):
    """A tensor of zeros quantizes to zeros with finite scales, and so does its product.

    Handled in piper_kernels.weights.
    """
    weight = quantize(torch.zeros(64, 64))
    assert torch.equal(weight.dequantize(), torch.zeros(64, 64))
    assert weight.scale.float().isfinite().all()
    assert not weight.qdata.view(torch.uint8).any()
    if not isinstance(weight, RowQuantizedWeight):
        assert torch.equal(functional.linear(normal(3, 64), weight), torch.zeros(3, 64))


@every_format
def test_case_34_the_round_trip_does_not_depend_on_the_rows(quantize):
    """The quality of a round trip is the same for 384, 512 and 1024 rows.

    Handled in piper_kernels.weights.
    """
    found = []
    for rows in (384, 512, 1024):
        dense = normal(rows, 2048, seed=rows, dtype=torch.bfloat16)
        weight = quantize(dense)
        assert (weight.scale.float().abs().amax() > 0).all()
        found.append(sqnr(weight.dequantize(), dense))
    assert max(found) - min(found) < 0.3
    assert min(found) > 18


def read_after_update(first, second, update):
    first.add_(update)
    return second.dequantize()


@pytest.fixture
def compiled_read():
    torch._dynamo.reset()
    yield torch.compile(read_after_update, backend="aot_eager")
    torch._dynamo.reset()


def int8_weight():
    return ConvRotInt8Tensor.from_hp(normal(7, 64, seed=1), group_size=16)


def test_case_35_a_weight_given_twice_is_read_as_updated(compiled_read):
    """A compiled update of a weight that is given twice reads what eager mode reads.

    Handled in piper_kernels.weights.convrot.int8.
    """
    eager, weight, update = int8_weight(), int8_weight(), normal(7, 64)
    expected = read_after_update(eager, eager, update)
    assert torch.equal(compiled_read(weight, weight, update), expected)


def test_case_35_a_transposed_view_of_an_updated_weight_is_refused(compiled_read):
    """A compiled update beside a transposed view of the same weight is refused.

    Handled in piper_kernels.weights.convrot.int8.
    """
    weight = int8_weight()
    with pytest.raises(Exception, match="aliased inputs that are mutated"):
        compiled_read(weight, weight.t(), normal(7, 64))


def test_case_35_weights_that_share_codes_are_read_as_updated(compiled_read):
    """Of two weights that share codes and scales, one reads the compiled update of the other.

    Handled in piper_kernels.weights.convrot.int8.
    """

    def shared():
        first = int8_weight()
        return first, ConvRotInt8Tensor(first.qdata, first.scale, 16, torch.float32)

    update = normal(7, 64)
    expected = read_after_update(*shared(), update)
    assert torch.equal(compiled_read(*shared(), update), expected)


def test_case_40_a_merged_adapter_keeps_rotation_and_row_scales(tmp_path):
    """Merging an adapter keeps the rotated basis and the row scales, through offload and reload.

    Handled in piper_kernels.weights.convrot.int8, piper_kernels.weights.io.
    """
    dense = normal(64, 256)
    dense[:, 3] *= 40
    dense[7] *= 1000
    weight = ConvRotInt8Tensor.from_hp(dense, group_size=64)
    up, down = normal(64, 4, seed=1), normal(4, 256, seed=2) * 0.1
    weight.addmm_(up, down, alpha=0.5)
    save_quantized({"w": weight}, tmp_path / "w.safetensors")
    loaded = copy.deepcopy(load_quantized(tmp_path / "w.safetensors")["w"]).to("cpu", copy=True)
    assert (loaded.group_size, tuple(loaded.scale.shape)) == (64, (64, 1))
    merged = dense + 0.5 * up @ down
    step = merged.abs().amax(1, keepdim=True) / 127
    plain = (merged / step).round() * step
    # Relative to its row, so that the large one hides no other.
    error, of_plain = (
        ((found - merged).norm(dim=1) / merged.norm(dim=1)).mean()
        for found in (loaded.dequantize(), plain)
    )
    assert error < of_plain / 2


@every_format
def test_case_41_shapes_are_logical_everywhere(quantize, tmp_path):
    """A quantized weight has its logical shape, also when it is packed, loaded or updated.

    Handled in piper_kernels.weights, piper_kernels.weights.io.
    """
    weight = quantize(normal(96, 128))
    save_quantized({"m.weight": weight}, tmp_path / "w.safetensors")
    loaded = load_quantized(tmp_path / "w.safetensors")["m.weight"]
    assert tuple(weight.shape) == tuple(loaded.shape) == (96, 128)
    if isinstance(weight, RowQuantizedWeight):
        return
    layer = nn.Linear(128, 96, bias=False)
    layer.weight = nn.Parameter(loaded, requires_grad=False)
    assert layer.state_dict()["weight"].shape == (96, 128)
    assert weight.size(1) == 128
    assert tuple(weight.t().shape) == (128, 96)
    before = weight.dequantize()
    weight.addmm_(torch.ones(96, 1), torch.ones(1, 128))
    assert sqnr(weight.dequantize(), before + 1) > 15
    with pytest.raises(ValueError, match="shape mismatch"):
        weight.add_(torch.ones(96, 64))


@every_format
def test_case_43_the_logical_dtype_is_reported(quantize):
    """A module asks its first parameter for its dtype and hears a floating one.

    Handled in piper_kernels.weights.
    """
    weight = quantize(normal(64, 64, dtype=torch.bfloat16))
    if isinstance(weight, RowQuantizedWeight):
        assert weight.logical_dtype == torch.bfloat16
        return
    layer = nn.Linear(64, 64, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    assert next(layer.parameters()).dtype == torch.bfloat16
    assert next(layer.parameters()).is_floating_point()
    with torch.no_grad():
        assert layer(normal(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def marked_file(path, marker, features=512):
    text = json.dumps(marker).encode()
    save_file(
        {
            "m.weight": torch.randint(-127, 128, (3, features), dtype=torch.int8),
            "m.weight_scale": torch.rand(3, 1) + 0.1,
            "m.comfy_quant": torch.tensor(list(text), dtype=torch.uint8),
        },
        path,
    )


def test_case_44_a_marker_without_a_format_is_int8_with_a_warning(tmp_path):
    """A marker without a format is read as rotated INT8 with a warning.

    Handled in piper_kernels.weights.io.
    """
    path = tmp_path / "w.safetensors"
    marked_file(path, {"convrot": True, "per_row": True, "convrot_groupsize": 64})
    with pytest.warns(UserWarning, match=r"m\.weight.*no format; int8_tensorwise is assumed"):
        weight = load_quantized(path, logical_dtype=torch.float32)["m.weight"]
    assert (type(weight), weight.group_size) == (ConvRotInt8Tensor, 64)
    assert torch.equal(weight.qdata, load_file(path)["m.weight"])


def test_case_44_an_unknown_format_is_named(tmp_path):
    """A marker of an unknown format is refused with its layer, its value and the known ones.

    Handled in piper_kernels.weights.io.
    """
    path = tmp_path / "w.safetensors"
    marked_file(path, {"format": "int7"})
    with pytest.raises(WeightFileError, match=r"m\.weight.*'int7', allowed are .*int8_tensorwise"):
        load_quantized(path, logical_dtype=torch.float32)


@pytest.mark.parametrize("name", ["int8", "convrot-nvfp4"])
def test_case_50_fp16_activations_with_outliers_stay_finite(name):
    """FP16 activations near the largest number are rotated in FP32: no infinity, and close.

    Handled in piper_kernels.linear.convrot.
    """
    dense = normal(48, 256) / 256
    x = normal(7, 256, dtype=torch.float16)
    x[:, 3::16], x[2] = 6.5e4, -6.5e4
    # The signs of a row of the rotation add up to eight times the number, beyond FP16.
    factor = torch.tensor([1.0, 1.0, 1.0, -1.0])
    x[4] = 6.5e4 * torch.kron(torch.kron(factor, factor), factor).repeat(4)
    weight = QUANTIZERS[name](dense.half())
    found = functional.linear(x, weight)
    exact = x.double() @ weight.dequantize().double().t()
    assert found.isfinite().all()
    assert found.dtype == torch.float16
    assert sqnr(found, exact) > 15
