"""The fused decoder products with FP8 weights against plain torch.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import sys

import torch
from torch.nn import functional

from phyai.dispatch.config import KernelConfig
from phyai.kernels.decoder_fused_fp8 import run_fused_fp8
from phyai.layers import Linear, RotaryEmbedding
from phyai.models.measuring import policy_in_force
from phyai.models.pi05.decoder import Decoder
from phyai.models.pi05.sizes import DecoderSizes
from phyai.models.pi05.stream import LayerModulation, Place
from phyai.runtime.paged import PagedKVCache
from phyai.runtime.segments import SegmentPlan, segment_row
from phyai.triton import decoder, decoder_fp8
from phyai.triton.decoder import Tiles
from phyai.triton.decoder_fp8 import Codes

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
# The interpreter cuts values off where a GPU rounds them to bf16.
STEP = 6e-3 if DEVICE == "cuda" else 1.2e-2
GENERATOR = torch.Generator().manual_seed(0)
EPS = 1e-6
POLICY = {
    "quantization": {
        "rules": [
            {
                "match": {"regex": r"body\..*_proj$"},
                "weight": {"dtype": "fp8_e4m3"},
                "input": {"dtype": "fp8_e4m3"},
                "stored_by": "fp8_rows",
            }
        ]
    }
}


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=GENERATOR).to(device=DEVICE, dtype=dtype)


def close(found, expected, what, *, steps=1):
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < steps * STEP, (what, float(error))


def coded(*shape):
    """Returns FP8 rows of very different scales and their values in fp32."""
    drawn = (normal(*shape, dtype=torch.float32) * 100).clamp(-448, 448)
    codes = drawn.to(torch.float8_e4m3fn)
    scale = torch.logspace(-1, 1, shape[0], device=DEVICE)[
        torch.randperm(shape[0], generator=GENERATOR).to(DEVICE)
    ] * (0.01 * shape[1] ** -0.5)
    return Codes(codes, scale), codes.float() * scale[:, None]


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
    positions = torch.arange(rows, device=DEVICE) + 3
    angles = torch.rand(rows + 3, dim // 2, generator=GENERATOR).to(DEVICE) * 6
    table = torch.cat([angles.cos(), angles.sin()], 1)
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
    codes, weight = coded((heads + 2) * dim, width)
    product = (expected @ weight.T).view(rows, heads + 2, dim)
    left, right = product.chunk(2, -1)
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
    for columns in (32, 64):
        keys, values = (torch.full((rows + 9, 1, 1, dim), torch.nan).to(x) for _ in range(2))
        query = decoder_fp8.norm_qkv(
            entered, codes, weight @ shift, heads=heads, rotation=table[positions],
            keys=keys, values=values, first_slot=5, eps=EPS, tiles=Tiles(columns, 128, 2),
        )  # fmt: skip
        close(query, turned[:, :heads], "queries")
        close(keys[5 : 5 + rows, 0, 0], turned[:, heads], "keys")
        close(values[5 : 5 + rows, 0, 0], product[:, heads + 1], "values")
        for slot in (keys, values):
            outside = torch.cat([slot[:5], slot[5 + rows :]])
            assert outside.isnan().all(), "other slots written"

    codes, weight = coded(2 * mlp, width)
    product = expected @ weight.T
    activated = functional.gelu(product[:, :mlp], approximate="tanh") * product[:, mlp:]
    for columns in (32, 64):
        tiles = Tiles(columns, 128, 2)
        hidden = decoder_fp8.norm_gate_up(entered, codes, weight @ shift, eps=EPS, tiles=tiles)
        close(hidden, activated, "hidden")

    counters = decoder.counters_for(rows, width, x.device)
    codes, weight = coded(width, mlp)
    following = normal(width, dtype=torch.float32)
    total = x.float() + gate * (hidden.float() @ weight.T)
    for columns, splits in ((32, 1), (32, 2), (64, 2)):
        tiles = Tiles(columns, 128, 2, splits)
        found = decoder_fp8.add_product(hidden, codes, x, gate, following, counters, tiles)
        close(found.residual, total, f"residual of {splits}")
        close(found.scaled, total * (1 + following), f"scaled of {splits}")
        close(found.squares.sum(0), found.residual.float().square().sum(-1), "squares")
        assert not counters.any(), "a counter was left behind"


def check_layers(rows):
    """All layers, fused, against the layers one by one in bf16 with the numbers of the codes."""
    sizes = DecoderSizes(512, layers=2, heads=2, kv_heads=1, head_dim=256, mlp=1024)

    def build(policy):
        with policy_in_force(KernelConfig(policy_config=policy), DEVICE, "pi05"):
            return Decoder(
                sizes, prefix="body", role="expert", attention_role="expert", adaptive=True,
                params_dtype=torch.bfloat16, device=DEVICE,
            )  # fmt: skip

    body, plain = build(POLICY), build({})
    pairs = zip(body.modules(), plain.modules(), strict=True)
    for ours, theirs in ((a, b) for a, b in pairs if isinstance(a, Linear)):
        for leg in ours.legs:
            weight = normal(leg.width, ours.in_features) * ours.in_features**-0.5
            ours.spec.load_weight(ours, "weight", weight, leg.shard_id)
        ours.post_load()
        if ours.weight.dtype == torch.float8_e4m3fn:
            theirs.weight.data.copy_(ours.spec.dequantize_weight(ours))
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
    expected = plain.run_layers(x, place, steps)
    written = cache.keys[:, 80:].clone(), cache.values[:, 80:].clone()
    for stored in (cache.keys, cache.values):
        stored[:, 80:] = torch.nan
    final, constants = normal(1, 3 * 512, dtype=torch.float32), {}
    whole = expected.residual + expected.gate * expected.update
    for _ in range(2):  # the second time with the constants of the first
        found, update, gate = run_fused_fp8(body, x, place, steps, final, constants)
        assert (update, gate) == (None, None)
        close(found, whole, f"layers of {rows} rows", steps=2)
    close(cache.keys[:, 80:], written[0], "keys of the layers", steps=2)
    close(cache.values[:, 80:], written[1], "values of the layers", steps=2)


def main():
    for rows in (1, 50, 67):
        check_products(rows)
    check_layers(5)


if __name__ == "__main__":
    main()
