import json
import struct

import pytest
import torch

from piper_kernels.weights.io import WeightFileError, load_quantized, read_header, save_quantized
from piper_kernels.weights.io._header import MAX_HEADER_BYTES


def write(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refused(path, match):
    """Both public readers must give the same verdict."""
    for reader in (read_header, load_quantized):
        with pytest.raises(WeightFileError, match=match) as caught:
            reader(path)
        assert str(path) in str(caught.value)


def test_a_good_header(path):
    write(path, {"__metadata__": {"k": "v"}, "a": entry(), "b": entry(offsets=(4, 8))}, bytes(8))
    header = read_header(path)
    assert header.metadata == {"k": "v"}
    start = path.stat().st_size - 8
    assert (header.tensors["b"].start, header.tensors["b"].end) == (start + 4, start + 8)
    assert header.tensors["a"].shape == (4,)
    assert torch.equal(load_quantized(path)["a"], torch.zeros(4, dtype=torch.uint8))


def test_trailing_byte(path):
    save_quantized({"a": torch.zeros(3)}, path)
    with path.open("ab") as file:
        file.write(b"\0")
    refused(path, "1 trailing bytes")


@pytest.mark.parametrize("keep", [0, 7])
def test_shorter_than_a_length(path, keep):
    path.write_bytes(bytes(keep))
    refused(path, f"{keep} bytes are no safetensors file")


def test_every_truncation_is_named(path):
    save_quantized({"a": torch.zeros(3), "b": torch.ones(2)}, path)
    whole = path.read_bytes()
    for length in range(8, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightFileError, match="truncated"):
            read_header(path)
    path.write_bytes(whole[:-1])
    refused(path, "1 of .* bytes are missing")


def test_duplicate_key(path):
    one = json.dumps(entry())
    write(path, f'{{"a": {one}, "a": {one}}}'.encode(), bytes(4))
    refused(path, "duplicate key 'a'")


def test_duplicate_key_in_an_entry(path):
    write(path, b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [], "data_offsets": [0, 1]}}', b"1")
    refused(path, "duplicate key 'dtype'")


def test_header_above_the_limit_is_not_read(path):
    # 0x07DF9D40 bytes of header: 1.29 million tensors in one file.
    path.write_bytes(struct.pack("<Q", 0x07DF9D40))
    assert MAX_HEADER_BYTES < 0x07DF9D40
    refused(path, "132,095,296 bytes, above the 100,000,000")


@pytest.mark.parametrize(
    ("start", "match"),
    [
        (b"PK\x03\x04aaaa", "zip archive"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b"version https://git-lfs", "Git LFS"),
        (b"\xff" * 8, "said to take"),
    ],
)
def test_other_files(path, start, match):
    path.write_bytes(start + bytes(100))
    refused(path, match)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"\xff\xfe", b'"x"', b"[" * 5000, b"{}x"], ids=range(7)
)
def test_headers_that_are_no_object(path, raw):
    write(path, raw)
    refused(path, "no JSON object")


@pytest.mark.parametrize(
    ("broken", "match"),
    [
        ({"dtype": "U8"}, "must have dtype"),
        (7, "must have dtype"),
        (entry("U7"), "unknown dtype 'U7'"),
        (entry(["U8"]), "unknown dtype"),
        (entry(shape=(-4,)), "non-negative"),
        (entry(shape=(True, 4)), "non-negative"),
        (entry(offsets=(0, 4.0)), "non-negative"),
        (entry(offsets=(0, 4, 8)), "two of them"),
        (entry("F32"), "needs 16 bytes, data_offsets give 4"),
        (entry(offsets=(4, 0)), "needs 4 bytes"),
        (entry(offsets=(1, 5)), "leaves a gap"),
    ],
)
def test_broken_entries(path, broken, match):
    write(path, {"a": broken}, bytes(8))
    refused(path, match)


def test_overlap(path):
    write(path, {"a": entry(), "b": entry(offsets=(2, 6))}, bytes(6))
    refused(path, "'b'.*overlaps")


@pytest.mark.parametrize("metadata", [[], {"a": 1}])
def test_broken_metadata(path, metadata):
    write(path, {"__metadata__": metadata})
    refused(path, "strings to strings")


def test_dtype_without_a_tensor_type(path):
    write(path, {"a": entry("F6_E2M3", (4,), (0, 3))}, bytes(3))
    assert read_header(path).tensors["a"].dtype == "F6_E2M3"
    with pytest.raises(WeightFileError, match="cannot be read as tensors"):
        load_quantized(path)
