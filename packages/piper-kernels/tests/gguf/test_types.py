import pytest
import torch

from piper_kernels.gguf import (
    GGUF_QUANT_SIZES,
    GGUFQuantizationType,
    dequantize,
    logical_shape,
    packed_row_size,
    reshape_packed,
)
from piper_kernels.gguf._types import resolve_quant_type

TYPES = list(GGUFQuantizationType)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_sizes_agree_with_the_gguf_package(kind):
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    theirs = gguf.GGMLQuantizationType(int(kind))
    assert theirs.name == kind.name
    assert gguf.GGML_QUANT_SIZES[theirs] == GGUF_QUANT_SIZES[kind]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_shapes_round_trip(kind):
    row_bytes = packed_row_size(1536, kind)
    assert logical_shape((2, 3, row_bytes), kind) == (2, 3, 1536)
    assert logical_shape(torch.Size([0, row_bytes]), int(kind)) == (0, 1536)
    assert packed_row_size(0, kind) == 0


def test_a_row_that_is_no_whole_number_of_blocks():
    for call in (logical_shape, lambda shape, t: dequantize(torch.zeros(shape).byte(), t)):
        with pytest.raises(ValueError, match=r"Q2_K.*84-byte block.*rows of 5120 bytes"):
            call((3, 5120), GGUFQuantizationType.Q2_K)
    with pytest.raises(ValueError, match=r"Q4_K packs rows of a multiple of 256 elements, got 128"):
        packed_row_size(128, GGUFQuantizationType.Q4_K)
    with pytest.raises(ValueError, match="got -32"):
        packed_row_size(-32, GGUFQuantizationType.Q8_0)


@pytest.mark.parametrize("kind", [9, 15, 16, 39, -1])
def test_unsupported_types(kind):
    with pytest.raises(ValueError, match=r"type -?\d+ is not supported; supported: F32 \(0\)"):
        dequantize(torch.zeros(1, 64, dtype=torch.uint8), kind)


def test_a_foreign_enum_is_named():
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    assert resolve_quant_type(gguf.GGMLQuantizationType.Q6_K) is GGUFQuantizationType.Q6_K
    with pytest.raises(ValueError, match="type IQ1_S is not supported"):
        resolve_quant_type(gguf.GGMLQuantizationType.IQ1_S)


@pytest.mark.parametrize("kind", [True, False, 8.0, "Q8_0"])
def test_types_that_are_no_integers(kind):
    with pytest.raises(TypeError, match="quant_type must be an integer"):
        dequantize(torch.zeros(1, 34, dtype=torch.uint8), kind)


def test_missing_type():
    with pytest.raises(TypeError, match="requires quant_type"):
        dequantize(torch.zeros(1, 34, dtype=torch.uint8))


def test_data_that_cannot_be_packed_bytes():
    with pytest.raises(TypeError, match="must be a tensor, got bytes"):
        dequantize(b"\0" * 34, 8)
    with pytest.raises(ValueError, match="at least one axis"):
        dequantize(torch.tensor(1, dtype=torch.uint8), 8)
    with pytest.raises(ValueError, match="at least one axis"):
        logical_shape((), 8)
    with pytest.raises(ValueError, match="strided layout"):
        dequantize(torch.zeros(1, 34).to_sparse(), 8)


def test_reshape_packed_keeps_the_bytes(packed_data):
    packed = packed_data.finite_packed(GGUFQuantizationType.Q8_0, 256, 1536)
    rows = reshape_packed(packed, 8, (6144, 64))
    assert rows.shape == (6144, 68)
    assert rows.data_ptr() == packed.data_ptr()
    assert torch.equal(dequantize(rows, 8), dequantize(packed, 8).view(6144, 64))
    packed.quant_type = 8
    assert reshape_packed(packed, None, [2, 3072, 64]).shape == (2, 3072, 68)
    with pytest.raises(ValueError, match=r"\(6144, 65\) holds 399360 elements.*393216"):
        reshape_packed(packed, 8, (6144, 65))
    with pytest.raises(ValueError, match="Q8_0 packs rows of a multiple of 32 elements, got 16"):
        reshape_packed(packed, 8, (24576, 16))
