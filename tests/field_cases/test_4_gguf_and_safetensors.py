"""GGUF and safetensors."""

import json
import struct
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from phyai.checkpoints import CheckpointError, CheckpointReader
from phyai_quant import load_quant_plan
from phyai_quant.offline.checks import check_checkpoint
from piper_kernels.gguf import GGUFQuantizationType, dequantize, packed_row_size, reshape_packed
from piper_kernels.weights.io import (
    WeightFileError,
    load_quantized,
    original_gguf_shape,
    read_header,
    save_quantized,
)
from piper_kernels.weights.validate import validate_file


def packed_rows(kind, rows, features, factors):
    """Random packed rows whose float16 factors, at the given bytes of each block, are moderate."""
    generator = torch.Generator().manual_seed(int(kind))
    block = packed_row_size(256, kind) if kind.name.endswith("_K") else packed_row_size(32, kind)
    blocks = rows * packed_row_size(features, kind) // block
    packed = torch.randint(0, 256, (blocks, block), generator=generator, dtype=torch.uint8)
    for offset in factors:
        factor = torch.full((blocks, 1), 0.03125 * (1 + offset % 3), dtype=torch.float16)
        packed[:, offset : offset + 2] = factor.view(torch.uint8)
    return packed.view(rows, -1)


def test_case_67_the_original_shape_of_a_folded_tensor_is_honoured():
    """A tensor stored in another 2-D shape gets its original one; another size is an error.

    Handled in piper_kernels.weights.io, piper_kernels.gguf.
    """
    metadata = {"comfy.gguf.orig_shape.w": [6144, 64]}
    assert original_gguf_shape("w", [256, 1536], metadata) == (6144, 64)
    packed = packed_rows(GGUFQuantizationType.Q8_0, 256, 1536, (0,))
    dense = dequantize(packed, 8, shape=(6144, 64))
    assert torch.equal(dense.flatten(), dequantize(packed, 8).flatten())
    assert reshape_packed(packed, 8, (6144, 64)).shape == (6144, 68)
    with pytest.raises(WeightFileError, match=r"comfy\.gguf\.orig_shape\.w.*6144, 63"):
        original_gguf_shape("w", [256, 1536], {"comfy.gguf.orig_shape.w": [6144, 63]})
    with pytest.raises(ValueError, match="original shape"):
        dequantize(packed, 8, shape=(6144, 63))


def test_case_68_rows_that_are_no_whole_blocks_are_refused():
    """Row bytes that are no multiple of the block are refused with type, block and row.

    Handled in piper_kernels.gguf.
    """
    with pytest.raises(ValueError, match=r"Q2_K.*84-byte block.*rows of 5120 bytes"):
        dequantize(torch.zeros(3, 5120, dtype=torch.uint8), GGUFQuantizationType.Q2_K)


@pytest.mark.parametrize(
    ("name", "features", "factors"),
    [
        pytest.param("Q4_0", 96, (0,), id="70-Q4_0"),
        pytest.param("Q6_K", 512, (208,), id="71-Q6_K"),
    ],
)
def test_case_70_blocks_equal_the_gguf_package(name, features, factors):
    """Q4_0 blocks (a factor and 16 bytes) decode to the bits of the gguf package.

    Handled in piper_kernels.gguf.
    """
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    kind = GGUFQuantizationType[name]
    packed = packed_rows(kind, 5, features, factors)
    expected = gguf.dequantize(packed.numpy(), gguf.GGMLQuantizationType(int(kind)))
    assert np.array_equal(dequantize(packed, kind).numpy(), expected)
    assert np.isfinite(expected).all()


def test_case_71_q6_k_equals_its_layout_number_by_number():
    """Q6_K decodes to the number of its byte layout, for one block and for strided rows.

    Handled in piper_kernels.gguf.
    """
    packed = packed_rows(GGUFQuantizationType.Q6_K, 3, 512, (208,))
    found = dequantize(packed[:, :], GGUFQuantizationType.Q6_K)
    for row, column in ((0, 0), (0, 31), (1, 100), (1, 255), (2, 256), (2, 511)):
        block = bytes(packed[row].tolist())[column // 256 * 210 :][:210]
        half, place = column % 256 // 128, column % 128
        quarter, lane = place // 32, place % 32
        low = block[64 * half + 32 * (quarter % 2) + lane] >> (4 if quarter >= 2 else 0) & 15
        high = block[128 + 32 * half + lane] >> 2 * quarter & 3
        scale = struct.unpack_from("b", block, 192 + column % 256 // 16)[0]
        factor = struct.unpack_from("<e", block, 208)[0]
        assert found[row, column].item() == factor * scale * ((low | high << 4) - 32)
    wide = torch.zeros(6, packed.shape[1] + 5, dtype=torch.uint8)
    wide[::2, 3:-2] = packed
    assert torch.equal(dequantize(wide[::2, 3:-2], GGUFQuantizationType.Q6_K), found)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def accepted(path):
    return load_quantized(path) is not None and not validate_file(path)


def refusals(path):
    """What every reader of safetensors files says about one that it must refuse."""
    (path.parent / "config.json").write_text("{}")
    found = {}
    for name, read, error in (
        ("header", read_header, WeightFileError),
        ("weights", load_quantized, WeightFileError),
        ("engine", lambda file: CheckpointReader(file.parent), CheckpointError),
    ):
        with pytest.raises(error) as caught:
            read(path)
        found[name] = str(caught.value)
    findings = validate_file(path)
    assert findings, "the validation of weights accepts it"
    found["validation"] = findings[0].message
    report = check_checkpoint(path.parent)
    assert report.failed, "the validation of checkpoints accepts it"
    found["checkpoint"] = report.findings[0].message
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert load_quant_plan(path.parent) is None  # a plan is left to whoever loads the file
    return found


def write(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def test_case_73_a_huge_header_is_refused_by_its_size(path):
    """A header of 132 MB, of 1.29 million tensors, is refused with its size and the limit.

    Handled in piper_kernels.weights.io, phyai.checkpoints.
    """
    path.write_bytes(struct.pack("<Q", 0x07DF9D40) + b"{" * 64)
    found = refusals(path)
    for reader in ("header", "weights", "validation", "checkpoint"):
        assert "132,095,296 bytes" in found[reader]
        assert "100,000,000" in found[reader]
    assert "model.safetensors" in found["engine"]


def test_case_74_a_key_that_stands_twice_is_called_duplicate(path):
    """A tensor that stands twice in a header is called a duplicate and named.

    Handled in piper_kernels.weights.io, phyai.checkpoints.
    """
    entry = '{"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}'
    write(path, f'{{"a.weight": {entry}, "a.weight": {entry}}}'.encode(), bytes(4))
    for reader, message in refusals(path).items():
        assert "duplicate key" in message, reader
        assert "a.weight" in message, reader


def test_case_76_negative_and_conjugate_views_are_saved_as_values(path):
    """Lazy negative and conjugate views are written as their values.

    Handled in piper_kernels.weights.io.
    """
    base = torch.randn(4, dtype=torch.cfloat, generator=torch.Generator().manual_seed(0))
    views = {"negative": base.conj().imag, "conjugate": base.conj(), "strided": base.real[::2]}
    # Nothing but the flag of this one tells that it is negative: its elements lie side by side.
    views["dense"] = torch._neg_view(torch.randn(4, generator=torch.Generator().manual_seed(1)))
    assert views["negative"].is_neg()
    assert views["dense"].is_neg()
    assert views["dense"].is_contiguous()
    assert views["conjugate"].is_conj()
    save_quantized(views, path)
    for name, loaded in load_quantized(path).items():
        assert torch.equal(loaded, views[name].resolve_conj().resolve_neg()), name


def test_case_77_one_byte_too_many_gets_one_verdict(path):
    """A file with one byte after its tensors is refused by every reader.

    Handled in piper_kernels.weights.io, piper_kernels.weights.validate, phyai.checkpoints,
    phyai_quant.offline.checks.
    """
    save_file({"a.weight": torch.ones(3, 4)}, path)
    assert accepted(path)
    with path.open("ab") as file:
        file.write(b"\0")
    found = refusals(path)
    assert "1 trailing bytes" in found["weights"]
    assert all(
        "model.safetensors" in message or "trailing" in message for message in found.values()
    )
