"""Rounded rows that norms and activations make for the generation tower's products."""

import pytest
import torch

from phyai.kernels.fp8_rows import Fp8Rows
from phyai.layers import Linear
from phyai.models.cosmos3.bench import kernels
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.random_weights import random_transformer
from phyai.models.cosmos3.state import Layout, Modalities
from piper_kernels.linear.convrot.int8 import rows

LAYOUT = Layout(2, 4, 6, clean_frames=(0,), fps=15.0)
FP8 = {
    "quantization": {
        "rules": [
            {
                "match": {"regex": r"gen_layers\.\d+\.(cross_attention|mlp)\.\w+$"},
                "weight": {"dtype": "fp8_e4m3"},
                "input": {"dtype": "fp8_e4m3"},
                "stored_by": "fp8_rows",
            }
        ]
    }
}
INT8 = {
    "quantization": {
        "rules": [
            {
                "match": {"regex": r"gen_layers\.\d+\.(cross_attention|mlp)\.\w+$"},
                "weight": {"dtype": "int8", "rotation_group": 16},
                "input": {"dtype": "int8", "granularity": "per_channel", "dynamic": True},
            }
        ]
    }
}


def make(variant, policy):
    """Returns a model under a policy, a state of two frames and two texts."""
    config = Cosmos3Config.tiny(variant, num_hidden_layers=2)
    with kernels(policy, "cpu"):
        model = random_transformer(config, params_dtype=torch.bfloat16, device="cpu")
    generator = torch.Generator().manual_seed(0)
    state = Modalities(torch.randn(4, 2, 4, 6, generator=generator))
    return model, state, [model.prefill(torch.arange(1, 8)), model.prefill(torch.arange(1, 4))]


@pytest.mark.parametrize("variant", ["qwen", "edge"])
def test_the_tower_rounds_once_where_it_can(variant, fused, monkeypatch):
    model, state, texts = make(variant, FP8)
    assert fused == [], "the text is read in bf16"
    found = model.velocities(state, 833, texts, LAYOUT)
    layer = ["rmsnorm_rows", "quantize_parts", "rmsnorm_rows", "activation_rows"]
    assert fused == 2 * layer
    fused.clear()
    model.velocities(state, 833, texts[:1], LAYOUT)
    assert fused == 2 * layer
    fused.clear()
    monkeypatch.setattr("phyai.layers.linear.Linear.takes_fp8_rows", lambda *_: False)
    expected = model.velocities(state, 833, texts, LAYOUT)
    assert fused == 2 * 4 * ["product"]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.video[:, :1], torch.zeros_like(ours.video[:, :1]))
        error = (ours.video - theirs.video).norm() / theirs.video.norm()
        assert error < 2e-2


@pytest.mark.parametrize("variant", ["qwen", "edge"])
def test_int8_rows_are_prepared_in_front_of_products(variant, monkeypatch):
    model, state, texts = make(variant, INT8)
    made = []
    for name in ("normed_rows", "joined_rows", "gated_rows"):
        function = getattr(rows, name)
        monkeypatch.setattr(
            rows, name, lambda *a, f=function, n=name, **k: made.append(n) or f(*a, **k)
        )
    expected = model.velocities(state, 833, texts, LAYOUT)
    assert made == [], "products on a CPU read values"
    takes, select, place = Linear.takes_int8_rows, Linear._select, torch.device("cpu")
    monkeypatch.setattr(
        Linear, "_select", lambda linear, count, dtype, _: select(linear, count, dtype, place)
    )
    monkeypatch.setattr(
        Linear,
        "takes_int8_rows",
        lambda linear, count, dtype, _: takes(linear, count, dtype, torch.device("cuda")),
    )
    found = model.velocities(state, 833, texts, LAYOUT)
    last = ["gated_rows"] if variant == "qwen" else []
    assert made == 2 * ["normed_rows", "joined_rows", "normed_rows", *last]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.video - theirs.video).norm() < 2e-2 * theirs.video.norm()


def test_rows_stand_for_their_values():
    x = torch.randn(3, 16).bfloat16()
    codes = Fp8Rows(x.to(torch.float8_e4m3fn), torch.ones(3), x.dtype)
    assert (codes.shape, codes.numel(), codes.device) == (x.shape, x.numel(), x.device)
