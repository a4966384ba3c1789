"""Kernels around the device functions of ``_triton``, and their numeric checks.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import sys

import torch
import triton
import triton.language as tl

from piper_kernels._triton.convrot import rotate
from piper_kernels._triton.convrot_int8 import divide_rows, quantize_rows
from piper_kernels._triton.nvfp4 import (
    decode_e2m1,
    decode_e4m3,
    encode_block,
    encode_e4m3,
    global_scale_from_amax,
    scale_offsets,
)
from piper_kernels._triton.reductions import row_amax
from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.convrot.int8._quantization import dynamic_quantize_rows

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@triton.jit
def rotate_kernel(source, out, GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    index = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(out + index, rotate(tl.load(source + index), GROUP))


@triton.jit
def quantize_kernel(
    source, qdata, scale, seed, ROWS: tl.constexpr, COLS: tl.constexpr, STOCHASTIC: tl.constexpr
):
    rows = tl.arange(0, ROWS)
    index = rows[:, None].to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
    codes, scales = quantize_rows(tl.load(source + index), seed, index, STOCHASTIC)
    tl.store(qdata + index, codes)
    tl.store(scale + rows, scales)


@triton.jit
def divide_kernel(source, scale, out, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    index = rows[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(out + index, divide_rows(tl.load(source + index), tl.load(scale + rows)))


@triton.jit
def nvfp4_kernel(
    source,
    global_scale,
    qdata,
    scale,
    seed,
    BLOCKS: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    blocks = tl.arange(0, BLOCKS)
    index = blocks[:, None].to(tl.int64) * 16 + tl.arange(0, 16)[None, :]
    packed, scales = encode_block(
        tl.load(source + index),
        tl.load(global_scale),
        seed,
        index,
        TWO_LEVEL,
        STOCHASTIC,
        HIGH_FIRST,
        NATIVE,
    )
    tl.store(qdata + blocks[:, None] * 8 + tl.arange(0, 8)[None, :], packed)
    tl.store(scale + blocks, scales)


@triton.jit
def decode_kernel(bytes_, e4m3, e2m1, again, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    code = tl.load(bytes_ + index)
    value = decode_e4m3(code)
    tl.store(e4m3 + index, value)
    tl.store(e2m1 + index, decode_e2m1(code & 15))
    tl.store(again + index, encode_e4m3(value))


@triton.jit
def amax_kernel(source, out, COLS: tl.constexpr):
    index = tl.arange(0, 2)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    amax = row_amax(tl.load(source + index))
    tl.store(out + tl.arange(0, 2), amax)
    tl.store(out + 2 + tl.arange(0, 2), global_scale_from_amax(amax))


@triton.jit
def offsets_kernel(out, columns, ROWS: tl.constexpr, BLOCKS: tl.constexpr, SWIZZLED: tl.constexpr):
    rows, blocks = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCKS)[None, :]
    tl.store(out + rows * BLOCKS + blocks, scale_offsets(rows, blocks, columns, SWIZZLED))


def check_rotation() -> None:
    generator = torch.Generator().manual_seed(3)
    for group in (16, 64, 256):
        for rows, cols in ((1, group), (4, 256), (2, 512), (1, 4096)):
            for dense in (
                torch.randint(-99, 99, (rows, cols), generator=generator).float(),
                torch.randn(rows, cols, generator=generator),
                torch.full((rows, cols), 3e38),
            ):
                out = torch.full_like(dense, torch.nan, device=DEVICE)
                rotate_kernel[(1,)](dense.to(DEVICE), out, GROUP=group, ROWS=rows, COLS=cols)
                expected = rotate_groups(dense.double(), group).float()
                torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=2e-6)
                if dense.frac().eq(0).all() and dense.abs().max() < 100:
                    assert torch.equal(out.cpu(), expected)


def quantize(dense, stochastic=False, seed=5):
    rows, cols = dense.shape
    qdata = torch.full((rows, cols), 99, dtype=torch.int8, device=DEVICE)
    scale = torch.full((rows, 1), torch.nan, device=DEVICE)
    quantize_kernel[(1,)](
        dense.to(DEVICE), qdata, scale, seed, ROWS=rows, COLS=cols, STOCHASTIC=stochastic
    )
    return qdata.cpu(), scale.cpu()


def check_division() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = 16384 if DEVICE == "cuda" else 64
    scale = (10 ** (torch.rand(rows, generator=generator) * 66 - 30)).clamp(1e-30, 2.6e36)
    scale[::2] = (scale[::2].view(torch.int32) | 0x7FFFFF).view(torch.float32)
    values = scale[:, None] * (torch.rand(rows, 256, generator=generator) * 254 - 127)
    values[:, 0] = 0
    out = torch.full_like(values, torch.nan).to(DEVICE)
    divide_kernel[(rows // 16,)](values.to(DEVICE), scale.to(DEVICE), out, ROWS=16, COLS=256)
    # The interpreter rounds twice where a GPU has a fused multiply-add.
    tolerance = 0 if DEVICE == "cuda" else 2e-7
    torch.testing.assert_close(out.cpu(), values / scale[:, None], rtol=tolerance, atol=0)


def check_int8_rows() -> None:
    dense = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    dense[1] = 0
    dense[2] *= 1e36
    dense[3] *= 1e-36
    dense[4] = (torch.arange(128) - 64) + 0.5  # halves: ties go to the even code
    dense[4, 0] = 127
    codes, scale = quantize(dense)
    expected_codes, expected_scale = dynamic_quantize_rows(dense)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes, expected_codes)
    dense[5, 3], dense[6, 4] = torch.nan, -torch.inf
    codes, scale = quantize(dense)
    assert scale[5].isnan()
    assert scale[6].isinf()
    assert codes[5:7].abs().max() == 0
    rows = torch.full((2, 4096), 0.25)
    rows[:, 0] = 127
    codes, scale = quantize(rows, stochastic=True)
    assert scale.tolist() == [[1.0], [1.0]]
    assert codes[:, 0].tolist() == [127, 127]
    assert set(codes[:, 1:].unique().tolist()) == {0, 1}
    assert abs(codes[:, 1:].double().mean().item() - 0.25) < 0.02
    assert not torch.equal(codes[0], codes[1])
    assert not torch.equal(codes, quantize(rows, True, 6)[0])


def nvfp4(values, global_scale=None, *, stochastic=False, high_first=False, seed=5):
    blocks = values.shape[0]
    qdata = torch.full((blocks, 8), 0xEE, dtype=torch.uint8, device=DEVICE)
    scale = torch.full((blocks,), 0xEE, dtype=torch.uint8, device=DEVICE)
    given = torch.tensor(1.0 if global_scale is None else global_scale, device=DEVICE)
    nvfp4_kernel[(1,)](
        values.to(DEVICE),
        given,
        qdata,
        scale,
        seed,
        BLOCKS=blocks,
        TWO_LEVEL=global_scale is not None,
        STOCHASTIC=stochastic,
        HIGH_FIRST=high_first,
        NATIVE=False,
    )
    packed = qdata.cpu()
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    return codes, scale.cpu()


def check_nvfp4_codes() -> None:
    values = torch.tensor(
        [0, 0.25, 0.26, 0.75, 1.25, 1.3, 1.75, 2.5, 3.5, 5, 5.1, 6, -0.25, -0.0, -5, -6]
    )
    expected = [0, 0, 1, 2, 2, 3, 4, 4, 6, 6, 7, 7, 8, 8, 14, 15]
    codes, scale = nvfp4(values[None])
    assert codes[0].tolist() == expected
    assert scale.tolist() == [0x38]  # 1.0
    swapped, _ = nvfp4(values[None], high_first=True)
    assert torch.equal(swapped.view(-1, 2).flip(1).flatten(), codes[0])
    # A zero block stores the smallest normal scale; an infinity saturates, a NaN stays.
    special = torch.zeros(4, 16)
    special[1, 3], special[2, 4], special[3, 5] = torch.inf, torch.nan, 1e30
    codes, scale = nvfp4(special)
    assert scale.tolist() == [0x08, 0x7E, 0x7F, 0x7E]
    assert [codes[1, 3], codes[2, 4] & 7, codes[3, 5]] == [7, 7, 7]


def check_nvfp4_two_levels() -> None:
    dense = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    g = (dense.abs().max() / 2688).item()
    codes, scale = nvfp4(dense, g)
    g_tensor = torch.tensor(g)
    block = (dense.abs().amax(1) / 6 / g_tensor).clamp(2**-6, 448).to(torch.float8_e4m3fn)
    assert torch.equal(scale, block.view(torch.uint8))
    scaled = dense * ((1 / g_tensor) / block.float())[:, None]
    signed = torch.where(codes >= 8, -1.0, 1.0) * LEVELS[(codes & 7).long()]
    distance = (scaled.clamp(-6, 6)[..., None] - torch.cat((LEVELS, -LEVELS))).abs().amin(-1)
    torch.testing.assert_close((scaled.clamp(-6, 6) - signed).abs(), distance)


def check_nvfp4_stochastic() -> None:
    for value, low, high in ((0.1, 0, 1), (2.25, 4, 5), (5, 6, 7), (-0.7, 9, 10), (-3.5, 13, 14)):
        rows = torch.full((256, 16), float(value))
        rows[:, 0] = 6
        codes, scale = nvfp4(rows, stochastic=True)
        assert scale.unique().tolist() == [0x38]
        assert codes[:, 0].unique().tolist() == [7]
        body = codes[:, 1:]
        assert set(body.unique().tolist()) == {low, high}
        signed = torch.where(body >= 8, -1.0, 1.0) * LEVELS[(body & 7).long()]
        assert abs(signed.mean().item() - value) < 0.06, value
    exact = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).repeat(1, 2)
    assert nvfp4(exact, stochastic=True)[0].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7] * 2]


def check_decoding() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    e4m3, e2m1 = (torch.empty(256, device=DEVICE) for _ in range(2))
    again = torch.empty(256, dtype=torch.uint8, device=DEVICE)
    decode_kernel[(1,)](codes.to(DEVICE), e4m3, e2m1, again, SIZE=256)
    expected = codes.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(e4m3.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(e2m1.cpu()[:16], torch.cat((LEVELS, -LEVELS)))
    assert torch.equal(again.cpu()[8:127], codes[8:127])


def check_reductions_and_offsets() -> None:
    source = torch.randn(2, 64)
    source[1, 7] = torch.nan
    out = torch.empty(4, device=DEVICE)
    amax_kernel[(1,)](source.to(DEVICE), out, COLS=64)
    assert out[0].item() == source[0].abs().max().item()
    assert out[2].item() == (source[0].abs().max() / 2688).item()
    assert out.cpu()[[1, 3]].isnan().all()
    amax_kernel[(1,)](torch.zeros(2, 64, device=DEVICE), out, COLS=64)
    assert out[2].item() == 2.0**-120
    for swizzled in (False, True):
        rows, blocks = 256, 8
        out = torch.empty(rows, blocks, dtype=torch.int64, device=DEVICE)
        columns = 2 if swizzled else blocks
        offsets_kernel[(1,)](out, columns, ROWS=rows, BLOCKS=blocks, SWIZZLED=swizzled)
        r, c = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
        tile = (r // 128) * 2 + c // 4
        expected = (tile * 32 + r % 128 % 32) * 16 + (r % 128 // 32) * 4 + c % 4
        assert torch.equal(out.cpu(), expected if swizzled else r * blocks + c)


if __name__ == "__main__":
    check_rotation()
    check_division()
    check_int8_rows()
    check_nvfp4_codes()
    check_nvfp4_two_levels()
    check_nvfp4_stochastic()
    check_decoding()
    check_reductions_and_offsets()
    print("primitive checks passed")
