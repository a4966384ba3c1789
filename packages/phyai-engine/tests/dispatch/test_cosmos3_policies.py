"""Tuned policies of Cosmos3: the layers they quantize and the rows of every call on an H200."""

from pathlib import Path

import pytest

from phyai.dispatch import KernelQuery, ModelContext, Selector, load_policy
from phyai_quant.materialize import materialize

FOLDER = Path(__file__).parents[4] / "examples" / "cosmos3" / "kernel_policies"
# name: format that a layer of the generation tower ends in, and the row of its product
FORMATS = {
    "cosmos3_h200": ("bf16", "torch.gemm.bf16"),
    "cosmos3_h200_fast": ("convrot_int8_g64", "piper.gemm.convrot_int8"),
    "cosmos3_h200_fp8": ("fp8_per_channel", "triton.gemm.fp8_rows"),
    "cosmos3_h200_int8": ("convrot_int8_g64", "piper.gemm.convrot_int8"),
    "cosmos3_video_sparse": ("fp8_per_channel", "triton.gemm.fp8_rows"),
}
QUANTIZED = [
    "gen_layers.0.cross_attention.qkv_proj",
    "gen_layers.35.cross_attention.to_out",
    "gen_layers.7.mlp.gate_up_proj",
    "gen_layers.7.mlp.up_proj",
    "gen_layers.7.mlp.down_proj",
]
KEPT = [
    "language_model.layers.0.self_attn.qkv_proj",
    "language_model.layers.0.mlp.gate_up_proj",
    "gen_layers.0.self_attn.qkv_proj",
    "vae.gen_layers.0.mlp.down_proj",
    "proj_in",
    "proj_out",
    "time_embedder.linear_1",
    "audio_proj_in",
]
HEADS = {"heads": 32, "kv_heads": 8, "head_dim": 128}


@pytest.fixture(params=FORMATS)
def name(request):
    return request.param


@pytest.fixture
def selector(name, catalog, monkeypatch):
    problems = {"flashinfer": "not installed", "humming": "not installed"}
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", problems.get)
    policy = load_policy(FOLDER / f"{name}.yaml", catalog=catalog)
    return Selector(catalog, policy, device="nvidia:sm90", model=ModelContext("cosmos3"))


def chosen(selector, op, dims, *, dtypes=("input",), role="generation", quant=None, **attrs):
    query = KernelQuery.build(
        op,
        role=role,
        dtype=dict.fromkeys(dtypes, "bf16"),
        dims=dims,
        attrs=attrs,
        quant=quant,
    )
    trace = selector.explain(query)
    assert len(trace.matched_rules) == 1, (op, trace.matched_rules)
    return trace.selected


def test_only_the_generation_tower_is_quantized(name, selector):
    plan = selector.policy.quant_plan
    for layer in QUANTIZED:
        scheme = None if plan is None else plan.resolve(layer)
        assert materialize(scheme, 90).spec_id == FORMATS[name][0], layer
    for layer in KEPT:
        assert plan is None or plan.resolve(layer) is None, layer


def test_products(name, selector):
    plan = selector.policy.quant_plan
    scheme = None if plan is None else plan.resolve(QUANTIZED[0])
    for n, k in ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)):
        for spec, row in (
            (materialize(scheme, 90), FORMATS[name][1]),
            (materialize(None, 90), "torch.gemm.bf16"),
        ):
            dims = {"M": 6186, "N": n, "K": k}
            quant = spec.physical_signature
            found = chosen(selector, "gemm", dims, dtypes=("input", "output"), quant=quant)
            assert found == row


def test_rows_beside_products(selector):
    rows = {"tokens": 6186, "hidden": 4096}
    assert chosen(selector, "rmsnorm", rows, role="norm", variant="rms") == "triton.rmsnorm"
    dtypes = ("input", "weight", "residual")
    added = chosen(selector, "rmsnorm_add", rows, role="norm", variant="rms", dtypes=dtypes)
    assert added == "triton.rmsnorm_add"
    heads = {"tokens": 6186, "head_dim": 128, "heads_q": 32, "heads_k": 8}
    found = chosen(selector, "qk_norm_rope_append", heads, variant="rms")
    assert found == "triton.qk_norm_rope_append"
    for kind, gated in (("silu", True), ("relu2", False)):
        found = chosen(selector, "activation", rows, activation=kind, gated=gated)
        assert found == "triton.activation"


@pytest.mark.parametrize(("tokens", "sparse"), [(3093, False), (44_160, True)])
def test_attention(name, selector, tokens, sparse):
    dims = {**HEADS, "tokens": tokens, "kv_tokens": tokens + 82}
    dtypes = ("input", "key", "value")
    found = chosen(selector, "attention", dims, dtypes=dtypes, layout="padded", causal=False)
    expected = "piper.attention" if name == "cosmos3_h200_fast" else "sdpa.attention"
    routed = sparse and name == "cosmos3_video_sparse"
    assert found == ("piper.attention.sparse" if routed else expected)
    narrow = {**dims, "head_dim": 16}
    found = chosen(selector, "attention", narrow, dtypes=dtypes, layout="padded", causal=False)
    assert found == "sdpa.attention"
    text = {**HEADS, "tokens": 9000, "kv_tokens": 9000}
    found = chosen(
        selector,
        "attention",
        text,
        dtypes=dtypes,
        role="understanding",
        layout="padded",
        causal=True,
    )
    assert found == "sdpa.attention"
