"""Every FlashInfer row that this GPU can run, against the reference row on the same inputs."""

import pytest
import torch

from phyai.dispatch import KernelQuery, Selector
from phyai.dispatch.catalog import build_catalog
from phyai.dispatch.library import library_available
from phyai.runtime.paged import PagedPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        not (torch.cuda.is_available() and library_available("flashinfer")),
        reason="needs flashinfer",
    ),
]
CATALOG = build_catalog()
PAGED = ("", ".fa2", ".fa3", ".cudnn", ".trtllm-gen")
RAGGED = ("", ".fa2", ".fa3", ".cudnn", ".cutlass", ".cute-dsl")


def run(kernel_id, facts, args, **options):
    """Runs a row if its condition holds on this device, else skips with the reason."""
    op = CATALOG.impl(kernel_id).op
    query = KernelQuery.build(op, device="cuda", **facts)
    trace = Selector(CATALOG, device="cuda").explain(query)
    verdict = next(row for row in trace.candidates if row.kernel_id == kernel_id)
    if not verdict.eligible:
        pytest.skip(verdict.reason)
    entry_facts = CATALOG.entry(op).facts(query)
    try:
        return CATALOG.impl(kernel_id).prepare(entry_facts, {})(*args, **options)
    except ModuleNotFoundError as missing:
        pytest.skip(f"FlashInfer's own dependency {missing.name} is not installed")


def error(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def values(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def paged_case():
    slots = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    plan = PagedPlan.from_slots([50], [slots[:817]], "cuda")
    q = values(50, 8, 256)
    k, v = values(1000, 1, 1, 256, seed=1), values(1000, 1, 1, 256, seed=2)
    k[slots[817:]] = torch.nan
    v[slots[817:]] = torch.nan
    facts = {
        "role": "expert",
        "dtype": "bf16",
        "dims": {"tokens": 50, "heads": 8, "kv_heads": 1, "head_dim": 256},
        "attrs": {"layout": "paged", "causal": False},
    }
    return facts, (q, k, v, plan)


@pytest.mark.parametrize("variant", PAGED)
def test_paged_attention(variant):
    facts, args = paged_case()
    out = run(f"flashinfer.attention_paged{variant}", facts, args, scale=1 / 16)
    expected = run("eager.attention_paged", facts, args, scale=1 / 16)
    assert error(out, expected) < 1e-2


def test_paged_attention_is_captured_after_one_eager_call():
    facts, args = paged_case()
    eager = run("flashinfer.attention_paged.fa2", facts, args, scale=1 / 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run("flashinfer.attention_paged.fa2", facts, args, scale=1 / 16)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)


@pytest.mark.parametrize("variant", RAGGED)
@pytest.mark.parametrize("causal", [False, True])
def test_attention(variant, causal):
    q, k, v = values(2, 33, 8, 64), values(2, 65, 2, 64, seed=1), values(2, 65, 2, 64, seed=2)
    facts = {
        "dtype": dict.fromkeys(("input", "key", "value"), "bf16"),
        "dims": {"tokens": 66, "heads": 8, "kv_heads": 2, "head_dim": 64},
        "attrs": {"layout": "padded", "causal": causal},
    }
    out = run(f"flashinfer.attention{variant}", facts, (q, k, v), scale=0.125, causal=causal)
    expected = run("eager.attention", facts, (q, k, v), scale=0.125, causal=causal)
    assert error(out, expected) < 1e-2


def test_attention_of_packed_requests():
    q, k, v = values(98, 8, 64), values(130, 2, 64, seed=1), values(130, 2, 64, seed=2)
    facts = {
        "dtype": dict.fromkeys(("input", "key", "value"), "bf16"),
        "dims": {"tokens": 98, "heads": 8, "kv_heads": 2, "head_dim": 64},
        "attrs": {"layout": "ragged", "causal": True},
    }
    options = {"scale": 0.125, "causal": True, "lens": (33, 65), "kv_lens": (65, 65)}
    out = run("flashinfer.attention.fa2", facts, (q, k, v), **options)
    assert error(out, run("eager.attention", facts, (q, k, v), **options)) < 1e-2


@pytest.mark.parametrize("hidden", [8, 40, 128, 1024])
@pytest.mark.parametrize("variant", ["rms", "gemma"])
def test_rmsnorm(variant, hidden):
    x, residual, weight = values(7, hidden), values(7, hidden, seed=1), values(hidden, seed=2)
    names = dict.fromkeys(("input", "weight", "residual"), "bf16")
    facts = {"dtype": names, "dims": {"hidden": hidden}, "attrs": {"variant": variant}}
    out = run("flashinfer.rmsnorm", facts, (x, weight, 1e-6))
    assert error(out, run("torch.rmsnorm", facts, (x, weight, 1e-6))) < 1e-2
    args = (x, residual, weight, 1e-6)
    for actual, expected in zip(
        run("flashinfer.rmsnorm_add", facts, args),
        run("torch.rmsnorm_add", facts, args),
        strict=True,
    ):
        assert error(actual, expected) < 1e-2


@pytest.mark.parametrize("hidden", [8, 24, 32, 128, 1152])
def test_layernorm(hidden):
    x = values(7, hidden)
    weight, bias = values(hidden, dtype=torch.float32), values(hidden, dtype=torch.float32, seed=1)
    facts = {
        "dims": {"hidden": hidden},
        "dtype": {"input": "bf16", "weight": "fp32", "bias": "fp32"},
        "attrs": {"bias": True},
    }
    args = (x, weight, bias, 1e-6)
    assert (
        error(run("flashinfer.layernorm", facts, args), run("torch.layernorm", facts, args)) < 1e-2
    )


@pytest.mark.parametrize("hidden", [8, 24, 48, 64, 256])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_activation(name, hidden):
    facts = {
        "dtype": "bf16",
        "dims": {"hidden": hidden},
        "attrs": {"activation": name, "gated": True},
    }
    x = values(7, 2 * hidden)
    out = run(f"flashinfer.activation.{name}_and_mul", facts, (x,))
    assert error(out, run(f"torch.activation.{name}_and_mul", facts, (x,))) < 1e-2


@pytest.mark.parametrize("head_dim", [8, 16, 64, 128, 256])
def test_rope(head_dim):
    angles = torch.rand(64, head_dim // 2, device="cuda") * 6
    cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
    qkv = values(50, 10, head_dim)
    args = (torch.arange(50, device="cuda"), qkv[:, :8], qkv[:, 8:9], cache)
    facts = {
        "dtype": "bf16",
        "dims": {"head_dim": head_dim, "rotary_dim": head_dim},
        "attrs": {"rope_type": "default", "interleave": False},
    }
    outs = run("flashinfer.rope", facts, args), run("eager.rope", facts, args)
    for actual, expected in zip(*outs, strict=True):
        assert error(actual, expected) < 1e-2


def test_dense_gemm():
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(values(2560, 1024), requires_grad=False)
    x, bias = values(50, 1024, seed=1), values(2560, seed=2)
    facts = {
        "dtype": {"input": "bf16", "output": "bf16", "weight": "bf16"},
        "quant": {"format": "bf16"},
        "dims": {"M": 50, "N": 2560, "K": 1024},
    }
    out = run("flashinfer.gemm.bf16", facts, (layer, x, bias))
    assert error(out, run("torch.gemm.bf16", facts, (layer, x, bias))) < 1e-2


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
def test_fp8_product(granularity):
    from phyai_quant.scheme import Granularity, QDType, TensorQuant
    from phyai_quant.specs.base import AllocationRequest
    from phyai_quant.specs.fp8 import Fp8Spec

    weight = TensorQuant(QDType.FP8_E4M3, Granularity(granularity))
    dynamic = TensorQuant(QDType.FP8_E4M3, Granularity.PER_CHANNEL, dynamic=True)
    layer, spec = torch.nn.Module(), Fp8Spec(weight, dynamic)
    layer.spec, layer.prefix = spec, "layer"
    spec.allocate(
        layer,
        AllocationRequest(weight_shape=(256, 128), params_dtype=torch.bfloat16, device="cuda"),
    )
    spec.load_weight(layer, "weight", values(256, 128).to(torch.float8_e4m3fn))
    scale = torch.full((1,) if granularity == "per_tensor" else (256, 1), 0.5, device="cuda")
    spec.load_weight(layer, "weight_scale", scale)
    spec.process_after_loading(layer)
    facts = {
        "dtype": {"input": "bf16", "output": "bf16"},
        "quant": spec.physical_signature,
        "dims": {"M": 50, "N": 256, "K": 128},
    }
    x = values(50, 128, seed=1)
    out = run(f"torch.gemm.fp8_{granularity}", facts, (layer, x, None))
    assert error(out, run("torch.gemm.fp8_dequant", facts, (layer, x, None))) < 0.06
