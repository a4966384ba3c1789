"""The fused decoder products and attention over segments against plain torch.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import sys

import torch
from torch.nn import functional

from phyai.kernels.attention_segments import attention_segments
from phyai.kernels.decoder_fused import run_fused
from phyai.kernels.rope import rope_append
from phyai.layers import RotaryEmbedding
from phyai.models.pi05.decoder import Decoder
from phyai.models.pi05.sizes import DecoderSizes
from phyai.models.pi05.stream import LayerModulation, Place
from phyai.runtime.paged import PagedKVCache
from phyai.runtime.segments import SegmentPlan, segment_row
from phyai.triton import decoder, rope, segments
from phyai.triton.decoder import Tiles
from phyai.triton.persistent_entry import enter_kernel
from phyai.triton.small_gemm import small_gemm

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
# The interpreter cuts values off where a GPU rounds them to bf16.
STEP = 6e-3 if DEVICE == "cuda" else 1.2e-2
GENERATOR = torch.Generator().manual_seed(0)
EPS = 1e-6


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=GENERATOR).to(device=DEVICE, dtype=dtype)


def close(found, expected, what, *, steps=1):
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < steps * STEP, (what, float(error))


def norm(x, scale, shift):
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return wide * inverse * (1 + scale) + shift


def check_products(rows):
    """One sublayer boundary after another, at a width of a few tiles."""
    width, mlp, heads, dim = 256, 256, 2, 64
    x = normal(rows, width)
    scale, shift, gate = (normal(width, dtype=torch.float32) for _ in range(3))
    entered = decoder.enter(x, scale)
    expected = norm(x, scale, shift)
    weight = normal((heads + 2) * dim, width) * width**-0.5
    keys, values = (torch.full((rows + 9, 1, 1, dim), torch.nan).to(x) for _ in range(2))
    positions = torch.arange(rows, device=DEVICE) + 3
    angles = torch.rand(rows + 3, dim // 2, generator=GENERATOR).to(DEVICE) * 6
    table = torch.cat([angles.cos(), angles.sin()], 1)
    query = decoder.norm_qkv(
        entered, weight, weight.float() @ shift, heads=heads, rotation=table[positions],
        keys=keys, values=values, first_slot=5, eps=EPS,
    )  # fmt: skip
    product = (expected @ weight.float().T).view(rows, heads + 2, dim)
    left, right = product.chunk(2, -1)
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
    close(query, turned[:, :heads], "queries")
    close(keys[5 : 5 + rows, 0, 0], turned[:, heads], "keys")
    close(values[5 : 5 + rows, 0, 0], product[:, heads + 1], "values")
    for slot in (keys, values):
        outside = torch.cat([slot[:5], slot[5 + rows :]])
        assert outside.isnan().all(), "other slots written"

    weight = normal(2 * mlp, width) * width**-0.5
    hidden = decoder.norm_gate_up(entered, weight, weight.float() @ shift, eps=EPS)
    product = expected @ weight.float().T
    activated = functional.gelu(product[:, :mlp], approximate="tanh") * product[:, mlp:]
    close(hidden, activated, "hidden")

    counters = decoder.counters_for(rows, width, x.device)
    weight, following = normal(width, mlp) * mlp**-0.5, normal(width, dtype=torch.float32)
    total = x.float() + gate * (hidden.float() @ weight.float().T)
    for splits in (1, 2):
        tiles = Tiles(32, 128, 2, splits)
        found = decoder.add_product(hidden, weight, x, gate, following, counters, tiles)
        close(found.residual, total, f"residual of {splits}")
        close(found.scaled, total * (1 + following), f"scaled of {splits}")
        close(found.squares.sum(0), found.residual.float().square().sum(-1), "squares")
        assert not counters.any(), "a counter was left behind"


def check_attention(queries, prefixes, heads, dim, *, splits):
    """Groups of any lengths; slots that nobody sees and rows of no group hold not-a-numbers."""
    table, row, slot = [], 1, 2
    for count, (first, second) in zip(queries, prefixes, strict=True):
        runs = [(slot, first), (slot + first + 3, second)]
        table.append(segment_row((row, count), *runs))
        row, slot = row + count, slot + first + 3 + second + 1
    plan = SegmentPlan(
        torch.tensor(table, dtype=torch.int32, device=DEVICE), max(queries), max(map(sum, prefixes))
    )
    assert segments.key_splits(plan, heads, 1) == splits
    query = normal(row + 1, heads, dim)
    keys, values = (torch.full((slot + 1, 1, 1, dim), torch.nan).to(query) for _ in range(2))
    for start, count in [(r[2 + k], r[3 + k]) for r in table for k in (0, 2)]:
        keys[start : start + count] = normal(count, 1, 1, dim)
        values[start : start + count] = normal(count, 1, 1, dim)
    found = segments.attend(query, keys, values, plan, scale=dim**-0.5)
    expected = attention_segments(query, keys, values, plan, scale=dim**-0.5)
    close(found[1:row], expected[1:row], f"attention {queries} {prefixes}")


def check_entry(rows, width):
    x, scale = normal(rows, width), normal(width, dtype=torch.float32)
    residual, scaled = (torch.full_like(x, torch.nan) for _ in range(2))
    squares = torch.full((rows, 32), torch.nan, device=DEVICE)
    counters = torch.full((64,), 7, dtype=torch.int32, device=DEVICE)
    enter_kernel[(rows,)](
        x, scale, residual, scaled, squares, counters, width, BLOCK=1024, PARTS=32, COUNTERS=64
    )
    assert torch.equal(residual, x)
    close(scaled, x.float() * (1 + scale), "scaled rows")
    close(squares.sum(1), x.float().square().sum(1), "squares of rows")
    assert not squares[:, 1:].any()
    assert not counters.any()


def check_small_products():
    for rows, width, depth in ((1, 1, 1), (7, 33, 32), (50, 1030, 32), (50, 32, 1030)):
        x, bias = normal(rows, depth, dtype=torch.float32), normal(width, dtype=torch.float32)
        weight = normal(width, depth, dtype=torch.float32)
        for shift in (bias, None):
            found = small_gemm(x, weight, shift)
            expected = functional.linear(x.double(), weight.double(), None)
            expected = expected if shift is None else expected + shift.double()
            error = (found - expected).norm() / expected.norm()
            assert error < 1e-6, (rows, width, depth, float(error))


def check_append(tokens, heads_q, heads_k, dim):
    wide = normal(tokens, heads_q + 2 * heads_k, dim + 3)[..., :dim]
    angles = torch.rand(tokens + 4, dim // 2, generator=GENERATOR).to(DEVICE) * 6
    table = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.arange(tokens, device=DEVICE, dtype=torch.int32).flip(0) + 2
    found, expected = ([torch.full((tokens + 5, 1, heads_k, dim), torch.nan)] * 2 for _ in "ab")
    found, expected = ([page.clone().to(wide) for page in pages] for pages in (found, expected))
    rotated = rope.rope_append(positions, wide, table, *found, 3)
    close(rotated, rope_append(positions, wide, table, *expected, 3), "queries")
    for ours, theirs in zip(found, expected, strict=True):
        close(ours[3 : 3 + tokens], theirs[3 : 3 + tokens], "stored")
        assert torch.cat([ours[:3], ours[3 + tokens :]]).isnan().all(), "other slots written"


def check_layers(rows):
    """All layers, fused, against the layers one by one."""
    sizes = DecoderSizes(512, layers=2, heads=2, kv_heads=1, head_dim=256, mlp=512)
    body = Decoder(
        sizes, prefix="body", role="expert", attention_role="expert", adaptive=True,
        params_dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    for weight in body.parameters():
        weight.data.copy_(normal(*weight.shape) * weight.shape[-1] ** -0.5)
    prefix, x = 70, normal(rows, 512)
    table = torch.tensor([segment_row((0, rows), (2, prefix), (80, rows))], dtype=torch.int32)
    plan = SegmentPlan(table.to(DEVICE), rows, prefix + rows)
    rotary = RotaryEmbedding(256, 2, 1, max_positions=prefix + rows, device=DEVICE)
    cache = PagedKVCache.allocate(
        layers=2, slots=80 + rows, kv_heads=1, head_dim=256, dtype=torch.bfloat16, device=DEVICE
    )
    for stored in (cache.keys, cache.values):
        stored.copy_(normal(*stored.shape))
    place = Place(torch.arange(rows, device=DEVICE) + prefix, rotary, cache, 80, plan)
    steps = [
        LayerModulation(*(normal(1, 3 * 512, dtype=torch.float32) for _ in range(2)))
        for _ in range(2)
    ]
    expected = body.run_layers(x, place, steps)
    written = cache.keys[:, 80:].clone(), cache.values[:, 80:].clone()
    for stored in (cache.keys, cache.values):
        stored[:, 80:] = torch.nan
    final, constants = normal(1, 3 * 512, dtype=torch.float32), {}
    for _ in range(2):  # the second time with the constants of the first
        found, update, gate = run_fused(body, x, place, steps, final, constants)
        assert update is None
        assert gate is None
        whole = expected.residual + expected.gate * expected.update
        close(found, whole, f"layers of {rows} rows", steps=2)
    close(cache.keys[:, 80:], written[0], "keys of the layers", steps=2)
    close(cache.values[:, 80:], written[1], "values of the layers", steps=2)


def main():
    check_layers(5)
    for shape in ((1, 1, 1, 16), (7, 8, 1, 64), (5, 6, 2, 32)):
        check_append(*shape)
    check_entry(3, 1000)
    check_small_products()
    for rows in (1, 50, 67):
        check_products(rows)
    check_attention([5], [(70, 5)], 4, 64, splits=2)
    check_attention([1, 17, 3], [(1, 0), (300, 17), (128, 0)], 8, 32, splits=5)
    check_attention([9], [(0, 9)], 1, 16, splits=1)
    count = segments.BLOCK_M * 64 + 5
    check_attention([count], [(70, 0)], 1, 16, splits=1)


if __name__ == "__main__":
    main()
    print("checks passed")
