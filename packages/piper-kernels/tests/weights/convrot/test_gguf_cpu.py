"""The opt-in conversion on the CPU: right for every type, and bounded in memory."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from piper_kernels.gguf import GGUF_QUANT_SIZES, GGUFQuantizationType, dequantize
from piper_kernels.weights.convrot import _gguf
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor

TYPES = list(GGUFQuantizationType)
CLASSES = [ConvRotInt8Tensor, ConvRotNVFP4Tensor]


class LiveBytes(TorchDispatchMode):
    """Records the most bytes that fresh results of operators kept alive at one time."""

    def __init__(self, *existing):
        super().__init__()
        self.existing = {tensor.untyped_storage().data_ptr() for tensor in existing}
        self.tensors = weakref.WeakValueDictionary()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.tensors[id(tensor)] = tensor
        storages = [tensor.untyped_storage() for tensor in self.tensors.values()]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self.peak = max(self.peak, sum(n for p, n in sizes.items() if p not in self.existing))
        return result


def assert_same_weight(actual, expected):
    names, attributes = expected.__tensor_flatten__()
    assert actual.__tensor_flatten__() == (names, attributes)
    for name in names:
        left, right = getattr(actual, name), getattr(expected, name)
        if left.dtype == torch.float8_e4m3fn:
            left, right = left.view(torch.uint8), right.view(torch.uint8)
        assert torch.equal(left, right), name


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_equals_quantizing_the_decoded_rows(
    cls, kind, packed_data, nan_filled_allocations
):
    group = (16, 64, 256)[int(kind) % 3]
    features = 768 if max(GGUF_QUANT_SIZES[kind][0], group) == 256 else 320
    packed = packed_data.finite_packed(kind, 5, features)
    weight = cls.from_gguf(
        packed, quant_type=kind, group_size=group, logical_dtype=torch.float32, allow_cpu=True
    )
    assert_same_weight(weight, cls.from_hp(dequantize(packed, kind), group_size=group))


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_rows_of_a_real_quantizer_survive(cls, name, packed_data):
    source, blocks, _ = packed_data.real_blocks()
    kind = GGUFQuantizationType[name]
    weight = cls.from_gguf(blocks[kind], quant_type=kind, group_size=256, allow_cpu=True)
    error = (weight.dequantize(torch.float32) - source).norm() / source.norm()
    assert error < (0.09 if cls is ConvRotInt8Tensor else 0.14)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_temporary_memory_is_bounded_by_bytes(cls, kind, packed_data, monkeypatch):
    packed = packed_data.finite_packed(kind, 640, 256)
    whole = cls.from_gguf(packed, quant_type=kind, group_size=64, allow_cpu=True)
    bound = 1 << 20
    monkeypatch.setattr(_gguf, "CPU_BLOCK_BYTES", bound)
    weight = cls.from_gguf(packed, quant_type=kind, group_size=64, allow_cpu=True)
    assert_same_weight(weight, whole)
    with LiveBytes(packed, weight.qdata, weight.scale) as live:
        weight.copy_from_gguf_(packed, quant_type=kind, allow_cpu=True)
    assert bound / 8 < live.peak <= bound
    assert_same_weight(weight, whole)


def test_a_row_wider_than_the_bound_is_converted_alone(packed_data, monkeypatch):
    monkeypatch.setattr(_gguf, "CPU_BLOCK_BYTES", 1)
    packed = packed_data.finite_packed(8, 3, 64)
    sizes = [values.shape for _, values in _gguf.packed_rows(packed, 8, 16).rotated_blocks(16)]
    assert sizes == [(1, 64)] * 3


@pytest.mark.parametrize("options", [{}, {"is_swizzled_scales": True, "high_first": True}])
def test_a_global_scale_is_that_of_the_whole_weight(options, packed_data, monkeypatch):
    packed = packed_data.finite_packed(8, 131, 96)
    convert = {"quant_type": 8, "group_size": 16, "compute_per_tensor_scale": True} | options
    whole = ConvRotNVFP4Tensor.from_gguf(packed, **convert, allow_cpu=True)
    monkeypatch.setattr(_gguf, "CPU_BLOCK_BYTES", 32 * 96 * 7)
    assert_same_weight(ConvRotNVFP4Tensor.from_gguf(packed, **convert, allow_cpu=True), whole)
    dense = dequantize(packed, 8)
    hp = ConvRotNVFP4Tensor.from_hp(dense, group_size=16, compute_per_tensor_scale=True)
    assert torch.equal(whole.per_tensor_scale, hp.per_tensor_scale)
    assert torch.equal(whole.dequantize(torch.float32), hp.dequantize(torch.float32))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_kernels_get_aligned_words(kind, packed_data):
    word = 4 if kind == GGUFQuantizationType.F32 else 2
    packed = packed_data.finite_packed(kind, 3, 256)
    assert _gguf.packed_rows(packed, kind, 16).aligned_data().data_ptr() == packed.data_ptr()
    blob = torch.cat((torch.zeros(word - 1, dtype=torch.uint8), packed.flatten()))
    odd = _gguf.packed_rows(blob[word - 1 :].view(3, -1), kind, 16)
    assert odd.data.data_ptr() % word
    assert odd.aligned_data().data_ptr() % word == 0
    assert torch.equal(odd.aligned_data(), packed)
