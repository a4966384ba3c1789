"""FP8 rows that norms and activations make for the generation tower's products."""

import pytest
import torch
from torch.nn import functional

from phyai.dispatch.call import CallSite
from phyai.dispatch.catalog import build_catalog
from phyai.kernels.fp8_rows import Fp8Rows
from phyai.kernels.gemm_fp8 import product
from phyai.layers import RMSNorm
from phyai.models.cosmos3.bench import kernels
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.random_weights import random_transformer
from phyai.models.cosmos3.state import Layout, Modalities
from phyai.triton import fp8_rows

LAYOUT = Layout(2, 4, 6, clean_frames=(0,), fps=15.0)
POLICY = {
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


def quantize(values):
    rows = values.reshape(-1, values.shape[-1]).float()
    scales = (rows.abs().amax(1) / 448).clamp_min(1e-12)
    return (rows / scales[:, None]).to(torch.float8_e4m3fn), scales


def activate(x, kind, *, gated):
    function = {"silu": functional.silu, "relu2": lambda v: functional.relu(v).square()}[kind]
    left, right = x.float().chunk(2, 1) if gated else (x.float(), None)
    found = function(left) if right is None else function(left) * right
    return quantize(found.to(x.dtype))


def norm(x, residual, weight, eps, *, cast_first=False):
    total = x if residual is None else x + residual
    wide = functional.rms_norm(total.float(), weight.shape, weight.float(), eps)
    return *quantize(wide.to(x.dtype)), total


@pytest.fixture
def fused(monkeypatch):
    """Lets the row of FP8 rows run on the CPU in plain torch; yields what was rounded by whom."""
    made = []
    functions = {
        "activation_rows": activate,
        "rmsnorm_rows": norm,
        "quantize_parts": lambda parts: quantize(torch.cat([*parts])),
    }
    for name, function in functions.items():
        monkeypatch.setattr(
            fp8_rows, name, lambda *a, f=function, n=name, **k: made.append(n) or f(*a, **k)
        )

    def scaled_mm(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)

    def inputs(x):
        made.append("product")
        return quantize(x)

    row = build_catalog().impl("triton.gemm.fp8_rows")
    run = product(inputs, fast=False)
    select = CallSite.select

    class Chosen:
        impl = row
        execute = staticmethod(run)

    def choose(self, **facts):
        quant = facts.get("quant")
        narrow = self.op == "gemm" and quant is not None and quant.format == "fp8_e4m3"
        return Chosen() if narrow else select(self, **facts)

    monkeypatch.setattr(CallSite, "select", choose)
    return made


@pytest.mark.parametrize("variant", ["qwen", "edge"])
def test_the_tower_rounds_once_where_it_can(variant, fused, monkeypatch):
    config = Cosmos3Config.tiny(variant, num_hidden_layers=2)
    with kernels(POLICY, "cpu"):
        model = random_transformer(config, params_dtype=torch.bfloat16, device="cpu")
    generator = torch.Generator().manual_seed(0)
    state = Modalities(torch.randn(4, 2, 4, 6, generator=generator))
    texts = [model.prefill(torch.arange(1, 8)), model.prefill(torch.arange(1, 4))]
    assert fused == [], "the text is read in bf16"
    found = model.velocities(state, 833, texts, LAYOUT)
    layer = ["rmsnorm_rows", "quantize_parts", "rmsnorm_rows", "activation_rows"]
    assert fused == 2 * layer
    fused.clear()
    model.velocities(state, 833, texts[:1], LAYOUT)
    layer[1] = "product"
    assert fused == 2 * layer, "attention of one branch is rounded by its product"
    fused.clear()
    monkeypatch.setattr("phyai.layers.linear.Linear.takes_fp8_rows", lambda *_: False)
    expected = model.velocities(state, 833, texts, LAYOUT)
    assert fused == 2 * 4 * ["product"]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.video[:, :1], torch.zeros_like(ours.video[:, :1]))
        error = (ours.video - theirs.video).norm() / theirs.video.norm()
        assert error < 2e-2


def test_rows_stand_for_their_values():
    x = torch.randn(3, 16).bfloat16()
    rows = Fp8Rows(*quantize(x), x.dtype)
    assert (rows.shape, rows.numel(), rows.device) == (x.shape, x.numel(), x.device)
    gemma = RMSNorm(16, prefix="a.norm", variant="gemma")
    with pytest.raises(ValueError, match=r"a\.norm: FP8 rows are made by variant 'rms'"):
        gemma.fp8_rows(x, None)
