"""Fuzz of the GGUF decoder: random blocks against the gguf package, wrong shapes by name."""

import numpy as np
import pytest
import torch
from fuzz_files import run_cases

from piper_kernels.gguf import GGUF_QUANT_SIZES, GGUFQuantizationType, dequantize

KINDS = sorted(GGUFQuantizationType)


def laid_out(rows, draw):
    """Return the packed rows in another memory layout: sliced, shifted, spread or as they are."""
    count, width = rows.shape
    layout = draw.choice(["plain", "slice", "offset", "every second row"])
    if layout == "slice":
        wide = torch.full((count, width + 5), 255, dtype=torch.uint8)
        wide[:, 2:-3] = rows
        return wide[:, 2:-3]
    if layout == "offset":
        flat = torch.full((count * width + 1,), 255, dtype=torch.uint8)
        flat[1:] = rows.flatten()
        return flat[1:].view(count, width)
    if layout == "every second row":
        spread = torch.full((2 * count, width), 255, dtype=torch.uint8)
        spread[::2] = rows
        return spread[::2]
    return rows


def test_random_blocks():
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

    def check(draw):
        kind = draw.choice(KINDS)
        elements, block = GGUF_QUANT_SIZES[kind]
        rows, blocks = draw.randrange(1, 6), draw.choice([1, 2, 3, 5, 8])
        if elements == 1:
            blocks *= 32
        source = np.frombuffer(draw.randbytes(rows * blocks * block), np.uint8).copy()
        packed = torch.from_numpy(source).view(rows, blocks * block)
        with np.errstate(invalid="ignore", over="ignore"):
            expected = gguf.dequantize(packed.numpy(), gguf.GGMLQuantizationType(int(kind)))
        values = dequantize(laid_out(packed, draw), kind)
        assert values.shape == (rows, blocks * elements), kind.name
        assert np.array_equal(values.numpy(), expected, equal_nan=True), kind.name
        shape = draw.choice([(-1,), (1, -1), (rows * blocks * elements // 2, 2)])
        folded = values.reshape(shape)
        if folded.numel() == values.numel():
            found = dequantize(packed, kind, shape=tuple(folded.shape))
            assert torch.equal(found.nan_to_num(7.0), folded.nan_to_num(7.0)), kind.name

    run_cases("gguf", 0.5, check, __file__)


def test_wrong_calls():
    def check(draw):
        kind = draw.choice([*KINDS, 9, 15, 99, -1, True, 8.0, "Q8_0", None])
        width = draw.choice([0, 1, 33, 34, 84, 5120, 210])
        packed = torch.zeros(draw.choice([(), (width,), (3, width), (2, 0, width)]))
        packed = packed.to(draw.choice([torch.uint8, torch.int8, torch.float32, torch.int64]))
        shape = draw.choice([None, (), (3, 32), (-1, 2), (2**40, 2**40), (96,)])
        try:
            values = dequantize(packed, kind, shape=shape)
        except (ValueError, TypeError) as error:
            return bool(str(error))
        assert values.dtype == torch.float32
        assert shape is None or tuple(values.shape) == shape
        return False

    outcomes = run_cases("gguf calls", 0.5, check, __file__)
    assert any(outcomes) or not outcomes
