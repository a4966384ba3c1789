"""Conversion of packed GGUF rows on a CUDA device."""

import pytest
import torch

from piper_kernels.gguf import GGUF_QUANT_SIZES, GGUFQuantizationType, dequantize
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4._layout import unswizzle_scale

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TYPES = list(GGUFQuantizationType)
MIB = 1 << 20


def assert_close_to_dense(weight, dense):
    """Compare with quantizing the decoded rows on the CPU: one code, and few of them."""
    expected = ConvRotInt8Tensor.from_hp(dense, group_size=weight.group_size)
    torch.testing.assert_close(weight.scale.cpu(), expected.scale, rtol=2e-6, atol=0)
    difference = (weight.qdata.cpu().int() - expected.qdata.int()).abs()
    assert difference.max() <= 1
    assert (difference != 0).float().mean() < 2e-3


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("group_size", [16, 64, 256])
def test_int8_of_every_type(kind, group_size, packed_data):
    wide = max(GGUF_QUANT_SIZES[kind][0], group_size) == 256
    for rows, features in [(1, 256), (37, 768 if wide else 1056 // group_size * group_size)]:
        packed = packed_data.finite_packed(kind, rows, features)
        weight = ConvRotInt8Tensor.from_gguf(packed.cuda(), quant_type=kind, group_size=group_size)
        assert_close_to_dense(weight, dequantize(packed, kind))


@pytest.mark.parametrize("features", [5376, 8192, 14336, 16384, 49152, 49408, 65536])
def test_int8_of_wide_rows(features, packed_data):
    kind = GGUFQuantizationType.Q6_K
    packed = packed_data.finite_packed(kind, 5, features)
    weight = ConvRotInt8Tensor.from_gguf(packed.cuda(), quant_type=kind, group_size=256)
    assert_close_to_dense(weight, dequantize(packed, kind))


def nvfp4_parts(weight):
    scale = weight.scale.view(torch.uint8).cpu()
    if weight.is_swizzled_scales:
        scale = unswizzle_scale(scale, weight.shape[0], weight.shape[1] // 16)
    codes = weight.qdata.cpu()
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2), scale.view(
        weight.shape[0], -1
    )


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("compute", [False, True])
def test_nvfp4_of_every_type(kind, compute, packed_data):
    packed = packed_data.finite_packed(kind, 133, 1280)
    options = {
        "group_size": 256,
        "compute_per_tensor_scale": compute,
        "is_swizzled_scales": True,
    }
    weight = ConvRotNVFP4Tensor.from_gguf(packed.cuda(), quant_type=kind, **options)
    expected = ConvRotNVFP4Tensor.from_hp(dequantize(packed, kind), **options)
    if compute:
        torch.testing.assert_close(
            weight.per_tensor_scale.cpu(), expected.per_tensor_scale, rtol=2e-6, atol=0
        )
    codes, scale = nvfp4_parts(weight)
    wanted_codes, wanted_scale = nvfp4_parts(expected)
    steps = (scale.int() - wanted_scale.int()).abs()
    assert steps.max() <= 1
    assert (steps != 0).float().mean() < 0.01
    same = (steps == 0).repeat_interleave(16, dim=1)
    distance = ((codes & 7).int() - (wanted_codes & 7).int()).abs() * same
    assert distance.max() <= 1
    assert (distance != 0).float().mean() < 2e-3
    assert (weight.scale.view(torch.uint8).cpu() != 0).sum() == (scale != 0).sum()


@pytest.mark.parametrize("cls", [ConvRotInt8Tensor, ConvRotNVFP4Tensor])
def test_refill_keeps_storage_and_equals_a_fresh_conversion(cls, packed_data):
    kind = GGUFQuantizationType.Q4_K
    extra = {} if cls is ConvRotInt8Tensor else {"compute_per_tensor_scale": True}
    first = packed_data.finite_packed(kind, 70, 1024, device="cuda")
    second = packed_data.finite_packed(kind, 70, 1024, seed=1, device="cuda")
    weight = cls.from_gguf(first, quant_type=kind, group_size=64, **extra)
    names = weight.__tensor_flatten__()[0]
    inner = {name: getattr(weight, name) for name in names}
    state = {name: (tensor.data_ptr(), tensor._version) for name, tensor in inner.items()}
    assert weight.copy_from_gguf_(second, quant_type=kind, **extra) is weight
    fresh = cls.from_gguf(second, quant_type=kind, group_size=64, **extra)
    for name in names:
        tensor = getattr(weight, name)
        assert tensor is inner[name]
        assert tensor.data_ptr() == state[name][0]
        assert tensor._version > state[name][1]
        wanted = getattr(fresh, name)
        if tensor.dtype == torch.float8_e4m3fn:
            tensor, wanted = tensor.view(torch.uint8), wanted.view(torch.uint8)
        assert torch.equal(tensor, wanted), name


@pytest.mark.parametrize("cls", [ConvRotInt8Tensor, ConvRotNVFP4Tensor])
@pytest.mark.parametrize("features", [4096, 65536])
def test_temporary_memory_is_bounded(cls, features, packed_data):
    kind = GGUFQuantizationType.Q4_K
    rows = (64 * MIB) // features
    packed = torch.zeros(rows, features // 256 * 144, dtype=torch.uint8, device="cuda")
    packed[:4] = packed_data.finite_packed(kind, 4, features, device="cuda")
    extra = {} if cls is ConvRotInt8Tensor else {"compute_per_tensor_scale": True}
    weight = cls.from_gguf(packed, quant_type=kind, group_size=256, **extra)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weight.copy_from_gguf_(packed, quant_type=kind, **extra)
    torch.cuda.synchronize()
    # A dense copy would take 256 MiB.
    assert torch.cuda.max_memory_allocated() - before <= MIB + 4096


@pytest.mark.parametrize("cls", [ConvRotInt8Tensor, ConvRotNVFP4Tensor])
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_misaligned_and_strided_rows(cls, kind, packed_data):
    packed = packed_data.finite_packed(kind, 4, 512, device="cuda")
    expected = cls.from_gguf(packed, quant_type=kind, group_size=64)
    blob = torch.zeros(packed.numel() + 1, dtype=torch.uint8, device="cuda")
    blob[1:] = packed.flatten()
    padded = torch.zeros(4, packed.shape[1] + 3, dtype=torch.uint8, device="cuda")
    padded[:, 1:-2] = packed
    for data in (blob[1:].view(4, -1), padded[:, 1:-2]):
        weight = cls.from_gguf(data, quant_type=kind, group_size=64)
        assert torch.equal(weight.qdata, expected.qdata)


@pytest.mark.parametrize("cls", [ConvRotInt8Tensor, ConvRotNVFP4Tensor])
def test_refill_is_capturable_in_a_cuda_graph(cls, packed_data):
    kind = GGUFQuantizationType.Q5_K
    packed = packed_data.finite_packed(kind, 9, 512, device="cuda")
    other = packed_data.finite_packed(kind, 9, 512, seed=2, device="cuda")
    extra = {} if cls is ConvRotInt8Tensor else {"compute_per_tensor_scale": True}
    weight = cls.from_gguf(packed, quant_type=kind, group_size=64, **extra)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight.copy_from_gguf_(packed, quant_type=kind, **extra)
    expected = cls.from_gguf(other, quant_type=kind, group_size=64, **extra)
    packed.copy_(other)
    graph.replay()
    assert torch.equal(weight.qdata, expected.qdata)


def test_dequantize_on_the_device_equals_the_cpu(packed_data):
    for kind in TYPES:
        packed = packed_data.finite_packed(kind, 3, 768)
        assert torch.equal(dequantize(packed.cuda(), kind).cpu(), dequantize(packed, kind)), kind


@pytest.mark.usefixtures("large_device_memory")
@pytest.mark.parametrize("cls", [ConvRotInt8Tensor, ConvRotNVFP4Tensor])
def test_offsets_beyond_32_bits(cls, packed_data):
    kind = GGUFQuantizationType.Q4_0
    features = 32768
    rows = (1 << 31) // features + 3
    packed = torch.zeros(rows, features // 32 * 18, dtype=torch.uint8, device="cuda")
    tail = packed_data.finite_packed(kind, 3, features, device="cuda")
    packed[-3:] = tail
    weight = cls.from_gguf(packed, quant_type=kind, group_size=256)
    expected = cls.from_gguf(tail, quant_type=kind, group_size=256)
    assert torch.equal(weight.qdata[-3:], expected.qdata)
    assert not (weight.qdata[:-3].view(torch.int64) & 0x7777777777777777).any()
