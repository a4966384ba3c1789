"""The rules of rows per chunk, worked by hand."""

import pytest

from piper_kernels.fusions._ffn import chunks
from piper_kernels.fusions._rows import require_rows


def test_int8_rows_fill_384_mib():
    # 14336 * 2 + 14336 + 4 = 43012 bytes a row: 9361 rows, 73 tiles of 128.
    assert chunks.int8_chunk_rows(1, 5376, 14336, 5376, 2) == 73 * 128
    # 2 * 19200 * 2 + 19200 + 4 = 96004 bytes a row: 4194 rows, 32 tiles of 128.
    assert chunks.int8_chunk_rows(2, 7168, 19200, 7168, 2) == 32 * 128
    # A result wider than the projections needs room of its own when it is not the output.
    assert chunks.int8_chunk_rows(1, 64, 64, 128, 2) == (384 << 20) // 196 // 128 * 128
    rows = chunks.int8_chunk_rows(1, 64, 64, 128, 2, gated_updates=True)
    assert rows == (384 << 20) // (196 + 256) // 128 * 128
    rows = chunks.int8_chunk_rows(2, 64, 64, 128, 2, gated_updates=True)
    assert rows == (384 << 20) // (2 * 128 + 68) // 128 * 128
    assert chunks.int8_chunk_rows(1, 8, 1 << 26, 8, 2) == 128


@pytest.mark.parametrize(
    ("rows", "chunk_rows", "expected"),
    [
        (32768, 4096, 4096),  # an eighth
        (65536, 4096, 4096),
        (16384, 4096, 2048),
        (16383, 4096, 1920),  # a short last chunk instead of a larger one
        (4096, 4096, 1024),  # four chunks of 1280 rows, which fill 128 MiB, are of equal length
        (1280, 4096, 1280),
        (100, 4096, 128),
        (32768, 1024, 1024),
        (32768, 64, 64),
        (0, 4096, 128),
    ],
)
def test_a_chunk_is_a_share_of_a_long_input(rows, chunk_rows, expected):
    assert chunks.int8_row_bytes(2, 7168, 19200, 7168, 2) == 96_004
    assert chunks.int8_rows_of(rows, chunk_rows, 96_004) == expected


@pytest.mark.parametrize(
    ("rows", "chunk_rows", "expected"),
    [
        (4096, 2432, 2048),
        (4097, 2432, 2176),
        (2433, 2432, 1280),
        (2432, 2432, 2432),
        (1, 2432, 128),
        (0, 64, 64),
        (100, 64, 64),
        (1000, 300, 256),
    ],
)
def test_chunks_are_equal(rows, chunk_rows, expected):
    found = chunks.balanced_rows(rows, chunk_rows)
    assert found == expected
    assert -(-rows // found) == -(-rows // chunk_rows)


def test_nvfp4_gelu_rows_fill_half_a_gib():
    # 5376 / 2 + 4 * 84 = 3024, 14336 * 2 = 28672, 14336 / 2 + 4 * 224 = 8064.
    assert chunks.nvfp4_gelu_chunk_rows(5376, 14336, 5376, 2) == (1 << 29) // 39760 // 128 * 128
    assert chunks.nvfp4_gelu_chunk_rows(16, 1 << 26, 16, 2) == 128


def test_symbolic_widths_take_the_default():
    assert chunks.int8_chunk_rows(2, object(), 64, 64, 2) == 2048
    assert chunks.nvfp4_gelu_chunk_rows(64, object(), 64, 2) == 1536


@pytest.mark.parametrize(
    ("rows", "multiple", "error"),
    [(0, 1, ValueError), (-1, 1, ValueError), (127, 128, ValueError), (True, 1, TypeError)],
)
def test_rows_are_checked(rows, multiple, error):
    require_rows("chunk_rows", 256, 128)
    with pytest.raises(error, match=r"^chunk_rows must be"):
        require_rows("chunk_rows", rows, multiple)
