"""The rules of rows per chunk, worked by hand."""

import pytest

from piper_kernels.fusions._ffn import chunks


def test_int8_gelu_rows_fill_one_gib():
    # 14336 * 2 + 14336 + 4 = 43012 bytes a row: 24963 rows, 195 tiles of 128.
    assert chunks.int8_gelu_chunk_rows(5376, 14336, 5376, 2) == 195 * 128
    # A result wider than the intermediate needs room of its own when it is not the output.
    assert chunks.int8_gelu_chunk_rows(64, 64, 128, 2) == (1 << 30) // 196 // 128 * 128
    rows = chunks.int8_gelu_chunk_rows(64, 64, 128, 2, gated_updates=True)
    assert rows == (1 << 30) // (196 + 256) // 128 * 128
    assert chunks.int8_gelu_chunk_rows(8, 1 << 26, 8, 2) == 128


def test_nvfp4_gelu_rows_fill_half_a_gib():
    # 5376 / 2 + 4 * 84 = 3024, 14336 * 2 = 28672, 14336 / 2 + 4 * 224 = 8064.
    assert chunks.nvfp4_gelu_chunk_rows(5376, 14336, 5376, 2) == (1 << 29) // 39760 // 128 * 128
    assert chunks.nvfp4_gelu_chunk_rows(16, 1 << 26, 16, 2) == 128


def test_symbolic_widths_take_the_default():
    assert chunks.int8_gelu_chunk_rows(object(), 64, 64, 2) == 4096
    assert chunks.nvfp4_gelu_chunk_rows(64, object(), 64, 2) == 1536


@pytest.mark.parametrize(
    ("rows", "multiple", "error"),
    [(0, 1, ValueError), (-1, 1, ValueError), (127, 128, ValueError), (True, 1, TypeError)],
)
def test_rows_are_checked(rows, multiple, error):
    chunks.require_chunk_rows(256, 128)
    with pytest.raises(error, match="chunk_rows must be"):
        chunks.require_chunk_rows(rows, multiple)
