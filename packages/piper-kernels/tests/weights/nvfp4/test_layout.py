import hashlib

import pytest
import torch

from piper_kernels.weights.nvfp4 import _layout

SHAPES = [(1, 1), (2, 2), (7, 3), (127, 4), (128, 4), (129, 5), (31, 13), (258, 8), (300, 1)]


def byte_offset(row, block, blocks):
    """The documented position of a block scale in the 128x4 layout."""
    column_tiles = -(-blocks // 4)
    tile = (row // 128) * column_tiles + block // 4
    return (tile * 32 + (row % 128) % 32) * 16 + ((row % 128) // 32) * 4 + block % 4


def random_bytes(rows, blocks):
    generator = torch.Generator().manual_seed(rows * 1000 + blocks)
    return torch.randint(1, 256, (rows, blocks), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_swizzle_places_every_byte_and_pads_with_zeros(rows, blocks):
    plain = random_bytes(rows, blocks)
    swizzled = _layout.swizzle_scale(plain)
    assert tuple(swizzled.shape) == _layout.scale_shape(rows, blocks * 16, swizzled=True)
    flat = swizzled.flatten().tolist()
    expected = [0] * len(flat)
    for row in range(rows):
        for block in range(blocks):
            expected[byte_offset(row, block, blocks)] = plain[row, block].item()
    assert flat == expected


@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_unswizzle_restores_any_form(rows, blocks):
    plain = random_bytes(rows, blocks)
    swizzled = _layout.swizzle_scale(plain)
    padding = _layout.swizzle_scale(torch.zeros_like(plain)) == swizzled
    swizzled[padding] = 255  # what lies in the padding must not matter
    for form in (swizzled, swizzled.flatten(), swizzled.t().contiguous().t()):
        assert torch.equal(_layout.unswizzle_scale(form, rows, blocks), plain)


def test_scale_dtype_is_kept():
    scale = torch.rand(5, 6).to(torch.float8_e4m3fn)
    swizzled = _layout.swizzle_scale(scale)
    assert swizzled.dtype == torch.float8_e4m3fn
    restored = _layout.unswizzle_scale(swizzled, 5, 6)
    assert torch.equal(restored.view(torch.uint8), scale.view(torch.uint8))


def test_no_rows():
    assert _layout.scale_shape(0, 64, swizzled=True) == (0, 16)
    assert _layout.swizzle_scale(torch.zeros(0, 4, dtype=torch.uint8)).shape == (0, 16)
    empty = torch.zeros(0, 16, dtype=torch.uint8)
    assert _layout.unswizzle_scale(empty, 0, 4).shape == (0, 4)


@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_swizzle_equals_torchao(rows, blocks):
    from torchao.prototype.mx_formats.utils import to_blocked

    plain = random_bytes(rows, blocks)
    assert torch.equal(_layout.swizzle_scale(plain).flatten(), to_blocked(plain))


def digest(tensor):
    return hashlib.sha256(bytes(tensor.flatten().tolist())).hexdigest()[:16]


def test_golden_digests():
    scale = (torch.arange(258 * 8) % 251).to(torch.uint8).view(258, 8)
    whole = _layout.swizzle_scale(scale)
    assert (whole.numel(), digest(whole)) == (3072, "6ec2efd43545faed")
    shard = _layout.swizzle_scale(_layout.unswizzle_scale(whole, 258, 8)[130:258])
    assert (shard.numel(), digest(shard)) == (1024, "da717142ca8bfaab")


def test_plain_scale_shape():
    assert _layout.scale_shape(7, 48, swizzled=False) == (7, 3)


def test_packing_orders():
    codes = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    assert _layout.pack_codes(codes).tolist() == [[0x21, 0x43]]
    assert _layout.pack_codes(codes, high_first=True).tolist() == [[0x12, 0x34]]


def test_swapping_pairs_is_its_own_inverse():
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    swapped = _layout.swap_packed_pairs(every)
    assert swapped[0x2F] == 0xF2
    assert torch.equal(_layout.swap_packed_pairs(swapped), every)
