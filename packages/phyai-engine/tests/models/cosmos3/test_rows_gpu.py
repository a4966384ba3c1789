"""Rows that the tuned policies choose, at the generation tower's shapes on a GPU."""

from pathlib import Path

import pytest
import torch

from phyai.dispatch.catalog import build_catalog
from phyai.dispatch.facts import Facts
from phyai.models.cosmos3.bench import cosines, kernels, measure_policy
from phyai.models.cosmos3.bench_video import sqnr_db
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.droid import PolicyContract
from phyai.models.cosmos3.random_weights import random_transformer
from phyai.models.cosmos3.state import ActionLayout, Layout, Modalities
from phyai.models.cosmos3.vae.random_weights import tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POLICIES = Path(__file__).parents[5] / "examples" / "cosmos3" / "kernel_policies"
CATALOG = build_catalog()
HEADS, KV_HEADS, WIDTH = 32, 8, 128
ACTION = ActionLayout(rows=9, start=0, clean_rows=(0,), raw_dim=8, domain_id=8)
LAYOUT = Layout(3, 13, 20, clean_frames=(0,), fps=15.0, action=ACTION)
# row: (params, decibels against fp32)
ATTENTION = {
    "sdpa.attention": ({"sdpa_backend": "cudnn"}, 45),
    "piper.attention": ({}, 33),
    "piper.attention.sage": ({}, 26),
    "piper.attention.sparse": ({"keep_ratio": 1.0}, 32),
}


def row(kernel_id, params=None, **facts):
    impl = CATALOG.impl(kernel_id)
    return impl.prepare(Facts({"op": impl.op, **facts}), params or {})


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(("rows", "text"), [(3093, 82), (1000, 10), (64, 0)])
def test_attention(name, rows, text):
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(count, heads):
        shape = (1, count, heads, WIDTH)
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    q, k, v = draw(rows, HEADS), draw(rows + text, KV_HEADS), draw(rows + text, KV_HEADS)
    expected = row("eager.attention")(q, k, v, scale=WIDTH**-0.5)
    params, least = ATTENTION[name]
    attend = row(name, params, **{"shape.heads": HEADS})
    by_heads = q.transpose(1, 2).contiguous().transpose(1, 2)  # as the generation tower has them
    for queries in (q, by_heads):
        found = attend(queries, k, v, scale=WIDTH**-0.5)
        assert found.shape == q.shape
        assert sqnr_db(found, expected) > least
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = attend(by_heads, k, v, scale=WIDTH**-0.5)
    graph.replay()
    assert sqnr_db(again, expected) > least


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (64, 8), (16, 8), (4, 1)])
@pytest.mark.parametrize("variant", ["rms", "rms_cast"])
def test_heads_are_normed_rotated_and_stored(heads, kv_heads, variant):
    tokens, slots = 517, torch.randperm(700, device="cuda")[:517]
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * WIDTH, device="cuda").bfloat16()
    weights = torch.rand(2, WIDTH, device="cuda") + 0.5
    angles = torch.rand(tokens, WIDTH // 2, device="cuda") * 6
    rotation = torch.cat((angles.cos(), angles.sin()), 1)
    found = []
    for kernel in ("triton.qk_norm_rope_append", "torch.qk_norm_rope_append"):
        shape = (2, 700, kv_heads, WIDTH)
        keys, values = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
        run = row(kernel, **{"attrs.variant": variant})
        query = run(qkv, *weights, rotation, slots, keys, values, 1e-6)
        found.append((query, keys[slots], values[slots], keys.isnan()))
    (query, keys, values, empty), expected = found
    assert sqnr_db(query, expected[0]) > 48
    assert sqnr_db(keys, expected[1]) > 48
    assert torch.equal(values, expected[2])
    assert torch.equal(empty, expected[3])


def velocities(policy, dtype, overlaps=True):
    """Of two layers of Nano's width under a policy, by branch."""
    config = Cosmos3Config(num_hidden_layers=2, vocab_size=512, num_embodiment_domains=9)
    generator = torch.Generator().manual_seed(0)
    shape = (config.latent_channel, LAYOUT.frames, LAYOUT.height, LAYOUT.width)
    video = torch.randn(shape, generator=generator).cuda()
    action = torch.randn(ACTION.rows, config.action_dim, generator=generator).cuda()
    with kernels(policy, "cuda"):
        model = random_transformer(config, params_dtype=dtype, device="cuda", domains=[8])
        for layer in model.generation.layers:
            layer.overlaps = overlaps
        texts = [model.prefill(torch.arange(1, count)) for count in (60, 11)]
        return model.velocities(Modalities(video, action), 833, texts, LAYOUT)


def test_velocities_under_every_policy():
    expected = velocities(None, torch.float32)
    least = dict.fromkeys(("cosmos3_h200_fp8", "cosmos3_h200_int8", "cosmos3_h200_fast"), 0.99)
    least["cosmos3_h200"] = 0.9995
    for name, bound in least.items():
        found = velocities(POLICIES / f"{name}.yaml", torch.bfloat16)
        for ours, theirs in zip(found, expected, strict=True):
            for part in ("video", "action"):
                one, other = (getattr(x, part).double().flatten() for x in (ours, theirs))
                cosine = float(torch.dot(one, other) / one.norm() / other.norm())
                assert cosine > bound, (name, part, cosine)


@pytest.mark.parametrize("name", ["cosmos3_h200", "cosmos3_h200_fast", "cosmos3_h200_fp8"])
def test_branches_on_two_streams_equal_those_on_one(name):
    alone = velocities(POLICIES / f"{name}.yaml", torch.bfloat16, overlaps=False)
    for _ in range(2):
        together = velocities(POLICIES / f"{name}.yaml", torch.bfloat16)
        for ours, theirs in zip(together, alone, strict=True):
            assert torch.equal(ours.video, theirs.video)
            assert torch.equal(ours.action, theirs.action)


def test_a_request_by_graphs():
    config = Cosmos3Config(
        num_hidden_layers=2, vocab_size=512, num_embodiment_domains=9,
        latent_channel=6, patch_latent_dim=24,
    )  # fmt: skip
    contract = PolicyContract(chunk=4, tier="256")
    found = [
        measure_policy(
            config, tiny_config(), POLICIES / f"{name}.yaml",
            device="cuda", contract=contract, requests=3, listed=3,
        )
        for name in ("cosmos3_h200", "cosmos3_h200_fp8")
    ]  # fmt: skip
    assert len(found[0]["longest"]) == 3
    assert found[0]["most_bytes"] > found[0]["weight_bytes"] > 0
    assert cosines(found[1]["actions"], found[0]["actions"])["least_cosine"] > 0.98
