import hashlib

import numpy
import pytest
import torch

from piper_kernels.gguf import (
    GGUF_QUANT_SIZES,
    SUPPORTED_GGUF_QUANT_TYPES,
    GGUFQuantizationType,
    _decode,
    dequantize,
)

TYPES = list(GGUFQuantizationType)
QUANTIZED = [kind.name for kind in TYPES if GGUF_QUANT_SIZES[kind][0] > 1]
K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def same_bits(actual, expected):
    return torch.equal(actual.view(torch.int32), expected.contiguous().view(torch.int32))


def oracle(packed, kind):
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    with numpy.errstate(invalid="ignore"):
        values = gguf.dequantize(packed.numpy(), gguf.GGMLQuantizationType(int(kind)))
    return torch.from_numpy(values)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 7])
def test_equals_the_gguf_package_bit_by_bit(kind, rows, nan_filled_allocations, packed_data):
    packed = packed_data.finite_packed(kind, rows, 768)
    values = dequantize(packed, kind)
    assert values.dtype == torch.float32
    assert values.shape == (rows, 768)
    assert same_bits(values, oracle(packed, kind))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_arbitrary_bytes_equal_the_gguf_package(kind):
    _, block_bytes = GGUF_QUANT_SIZES[kind]
    packed = torch.randint(0, 256, (3, block_bytes * 32), dtype=torch.uint8)
    values, expected = dequantize(packed, kind), oracle(packed, kind)
    finite = ~expected.isnan()
    assert torch.equal(values.isnan(), ~finite)
    assert same_bits(values[finite], expected[finite])


@pytest.mark.parametrize("name", QUANTIZED)
def test_blocks_of_a_real_quantizer(name, packed_data):
    source, packed, metadata = packed_data.real_blocks()
    kind = GGUFQuantizationType[name]
    values = dequantize(packed[kind], kind)
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == metadata[name]
    bits = 8 * GGUF_QUANT_SIZES[kind][1] / GGUF_QUANT_SIZES[kind][0]
    # A sensible quantizer gains about 6 dB per bit; a wrong decoder gives nothing near it.
    assert (values - source).norm() / source.norm() < 2.0 ** (0.7 - 0.9 * (bits - 1))


@pytest.mark.parametrize("name", K_QUANTS)
def test_k_quants_equal_a_scalar_decoder(name, packed_data):
    kind = GGUFQuantizationType[name]
    packed = packed_data.finite_packed(kind, 2, 256, seed=3)
    expected = torch.tensor(
        [
            [packed_data.scalar_value(name, bytes(row), i) for i in range(256)]
            for row in packed.numpy()
        ]
    )
    torch.testing.assert_close(dequantize(packed, kind), expected, rtol=1e-6, atol=1e-7)


def test_every_type_has_a_size_and_a_decoder():
    assert set(TYPES) == set(GGUF_QUANT_SIZES) == SUPPORTED_GGUF_QUANT_TYPES
    assert len(TYPES) == 15


@pytest.mark.parametrize("kind", [GGUFQuantizationType.F32, GGUFQuantizationType.F16])
def test_typed_rows_are_reinterpreted_and_not_aliased(kind):
    dtype = {0: torch.float32, 1: torch.float16}[int(kind)]
    rows = torch.randn(3, 5).to(dtype)
    values = dequantize(rows, kind)
    assert torch.equal(values, rows.float())
    rows.zero_()
    assert values.abs().sum() > 0


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_strided_and_misaligned_rows(kind, packed_data):
    packed = packed_data.finite_packed(kind, 4, 512)
    expected = dequantize(packed, kind)
    padded = torch.full((4, packed.shape[1] + 3), 255, dtype=torch.uint8)
    padded[:, 1:-2] = packed
    assert same_bits(dequantize(padded[:, 1:-2], kind), expected)
    blob = torch.cat((torch.zeros(1, dtype=torch.uint8), packed.flatten()))
    assert same_bits(dequantize(blob[1:].view(4, -1), kind), expected)
    assert same_bits(dequantize(packed.view(2, 2, -1), kind).view(4, -1), expected)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_one_block_at_an_odd_address(kind, packed_data):
    packed = packed_data.finite_packed(kind, 1, GGUF_QUANT_SIZES[kind][0])
    shifted = torch.zeros(packed.numel() + 1, dtype=torch.uint8)
    shifted[1:] = packed[0]
    assert same_bits(dequantize(shifted[1:], kind), dequantize(packed, kind)[0])


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_pieces_equal_the_whole(kind, packed_data, monkeypatch, nan_filled_allocations):
    packed = packed_data.finite_packed(kind, 3, 1280)
    whole = dequantize(packed, kind)
    monkeypatch.setattr(_decode, "_CPU_PIECE_VALUES", 512)
    assert same_bits(dequantize(packed, kind), whole)


def test_type_attribute_and_meta(packed_data):
    packed = packed_data.finite_packed(GGUFQuantizationType.Q8_0, 2, 64)
    expected = dequantize(packed, 8)
    packed.quant_type = GGUFQuantizationType.Q8_0
    assert same_bits(dequantize(packed), expected)
    assert dequantize(packed.to("meta"), 8).shape == (2, 64)


def test_zero_rows_and_zero_blocks():
    assert dequantize(torch.empty(0, 68, dtype=torch.uint8), 8).shape == (0, 64)
    for kind in TYPES:
        block = torch.zeros(2, GGUF_QUANT_SIZES[kind][1], dtype=torch.uint8)
        assert dequantize(block, kind).abs().sum() == 0


def test_original_shape_is_honoured(packed_data):
    packed = packed_data.finite_packed(GGUFQuantizationType.Q8_0, 256, 1536)
    flat = dequantize(packed, 8).flatten()
    assert same_bits(dequantize(packed, 8, shape=(6144, 64)).flatten(), flat)
    # Rows of 96 values split the 256-value blocks; decoding does not care.
    folded = packed_data.finite_packed(GGUFQuantizationType.Q6_K, 3, 256)
    assert dequantize(folded, 14, shape=(8, 96)).shape == (8, 96)
    for shape in [(6144, 63), (), (-6144, -64), (256, 1536, 2)]:
        with pytest.raises(ValueError, match=r"original shape .* holds .* elements"):
            dequantize(packed, 8, shape=shape)
