"""Rows of every family measured on this GPU. Compiles one FlashInfer module, one Humming kernel."""

import pytest
import torch

from phyai.dispatch import (
    KernelQuery,
    Selector,
    kernel_mode_scope,
    policy_from_mapping,
    set_kernel_selector,
)
from phyai.dispatch.bench_inputs import BenchInputs, InputSets
from phyai.dispatch.benchmark import default_benchmark
from phyai.dispatch.bootstrap import reset_kernel_selector
from phyai.dispatch.catalog import Catalog, build_catalog
from phyai.dispatch.conditions import is_set
from phyai.dispatch.library import library_available
from phyai.dispatch.opspec import Impl, OpSpec
from phyai.dispatch.tune_workload import Workload
from phyai.kernels.bench_gemm import gemm_inputs
from phyai.layers.attention import PagedAttention
from phyai.runtime.paged import PagedKVCache, PagedPlan
from phyai_quant import QuantScheme, TensorQuant, materialize

GPU = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")]

BF16 = {"input": "bf16", "weight": "bf16"}
MODULATED = {"input": "bf16", "modulation": "fp32"}
ROW = {"tokens": 50, "hidden": 1024}
OPERATIONS = {
    "rmsnorm": {"dtype": BF16, "dims": ROW, "attrs": {"variant": "gemma"}},
    "rmsnorm_add": {
        "dtype": {**BF16, "residual": "bf16"},
        "dims": ROW,
        "attrs": {"variant": "rms"},
    },
    "layernorm": {"dtype": {**BF16, "bias": "bf16"}, "dims": ROW, "attrs": {"bias": True}},
    "rmsnorm_silu_mul": {"dtype": BF16, "dims": ROW},
    "adarmsnorm": {"dtype": MODULATED, "dims": {**ROW, "cond_dim": 1024}},
    "adarmsnorm_add": {
        "dtype": {**MODULATED, "residual": "bf16", "gate": "bf16"},
        "dims": {**ROW, "cond_dim": 1024},
    },
    "channel_l2_norm": {
        "dtype": {**BF16, "compute": "fp32"},
        "dims": {"channels": 96},
        "attrs": {"channel_first": True, "bias": False, "fused_compatible": True},
    },
    "activation": {
        "dtype": "bf16",
        "dims": {"tokens": 50, "hidden": 4096},
        "attrs": {"activation": "gelu_tanh", "gated": True},
    },
    "modulate": {
        "dtype": {"input": "bf16", "scale": "bf16", "shift": "bf16"},
        "dims": {"batch": 2, "tokens": 50, "hidden": 1024},
    },
    "embedding": {
        "dtype": {"input": "int64", "weight": "bf16"},
        "dims": {"tokens": 200, "embedding_dim": 2048},
        "attrs": {"shard_start": 0, "shard_end": 257152},
    },
    "rope": {
        "dtype": "bf16",
        "dims": {"tokens": 50, "head_dim": 256, "rotary_dim": 256, "heads_q": 8, "heads_k": 1},
        "attrs": {"rope_type": "default", "interleave": False},
    },
    "causal_conv": {
        "dtype": "bf16",
        "dims": {"tokens": 50, "channels": 512, "kernel": 4},
        "attrs": {"activation": "silu", "split": False},
    },
}


@pytest.fixture(scope="module")
def catalog():
    return build_catalog()


@pytest.fixture(autouse=True)
def _fresh_selector():
    yield
    reset_kernel_selector()


def tuned(catalog, *rows, **options):
    rules = [{"id": row, "match": {"op": op}, "restrict_to": row} for op, row in rows]
    policy = policy_from_mapping({"profile": "autotune", "rules": rules}, catalog=catalog)
    hook = default_benchmark(catalog)
    return Selector(catalog, policy, device="cuda", benchmark=hook, **options)


def times_of(trace):
    assert trace.autotuned, trace.text
    rows = trace.candidates
    return {row.kernel_id: row.benchmark_ms for row in rows if row.benchmark_ms is not None}


@pytest.mark.parametrize("op", OPERATIONS)
def test_own_kernels_are_measured_against_the_reference(catalog, op, tmp_path):
    path = tmp_path / "times.json"
    query = KernelQuery.build(op, **OPERATIONS[op])
    selection = tuned(catalog, (op, f"triton.{op}"), autotune_cache=path).select(query)
    times = times_of(selection.trace)
    assert f"triton.{op}" in times
    assert len(times) == 2
    assert all(0 < value < 100 for value in times.values())
    assert selection.kernel_id == min(times, key=lambda name: times[name])
    again = tuned(catalog, (op, f"triton.{op}"), autotune_cache=path)
    assert again.explain(query).selected == selection.kernel_id


def gemm(scheme, m, n=2048, k=2048):
    major, minor = torch.cuda.get_device_capability()
    spec = materialize(scheme, 10 * major + minor)
    return KernelQuery.build(
        "gemm",
        dtype={"input": "bf16", "output": "bf16", "weight": spec.weight_dtype or "bf16"},
        quant=spec.physical_signature,
        dims={"M": m, "N": n, "K": k},
    )


def stored(dtype, **options):
    return TensorQuant(dtype, "per_channel", **options)


@pytest.mark.skipif(
    not GPU or torch.cuda.get_device_capability() < (8, 9), reason="needs FP8 products"
)
def test_fp8_products_beat_reading_the_weight_back(catalog):
    scheme = QuantScheme(stored("fp8_e4m3"), stored("fp8_e4m3", dynamic=True))
    times = times_of(tuned(catalog).select(gemm(scheme, 968)).trace)
    assert times["torch.gemm.fp8_per_channel"] < times["torch.gemm.fp8_dequant"]


def test_rotated_int8_products_are_measured(catalog):
    scheme = QuantScheme(stored("int8", rotation_group=64), stored("int8", dynamic=True))
    times = times_of(tuned(catalog).select(gemm(scheme, 50)).trace)
    assert {"piper.gemm.convrot_int8", "torch.gemm.convrot_int8"} <= set(times)


@pytest.mark.skipif(not (GPU and library_available("humming")), reason="needs humming-kernels")
def test_a_random_humming_layer_is_packed_and_its_copies_share_the_locks(catalog):
    quant = TensorQuant("int4", "block", block_shape=(1, 128))
    query = gemm(QuantScheme(quant, online=True), 16, n=512, k=256)
    selection = tuned(catalog).select(query)
    assert selection.kernel_id == "humming.gemm.w4a16"
    layer, x, bias = gemm_inputs(selection.facts, torch.device("cuda"))
    expected = selection.execute(layer, x, bias)
    sets = InputSets(BenchInputs((layer, x, bias)), 2**22)
    for _ in range(sets.count + 1):
        torch.testing.assert_close(selection.execute(*sets.next().args), expected)
    assert len(layer._humming_locks) == 1
    assert default_benchmark(catalog)(selection.impl, selection.facts, selection) > 0


@pytest.mark.skipif(not (GPU and library_available("flashinfer")), reason="needs flashinfer")
def test_paged_attention_is_measured_live_and_captured_calls_use_the_result(catalog):
    selector = tuned(catalog, ("attention_paged", "flashinfer.attention_paged.fa2"))
    set_kernel_selector(selector)
    cache = PagedKVCache.allocate(
        layers=2, slots=1024, kv_heads=1, head_dim=256, dtype=torch.bfloat16, device="cuda"
    )
    cache.keys.normal_()
    cache.values.normal_()
    plan = PagedPlan.from_slots([50], [torch.arange(1000)], "cuda")
    layers = [PagedAttention(8, 1, 256, layer=index, role="expert") for index in range(2)]
    query = torch.randn(50, 8, 256, dtype=torch.bfloat16, device="cuda")
    keys = cache.keys.clone()
    eager = [layer(query, cache, plan) for layer in layers]
    times = times_of(layers[0]._site.trace())
    assert set(times) == {"flashinfer.attention_paged.fa2", "eager.attention_paged"}
    assert torch.equal(cache.keys, keys)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph), kernel_mode_scope("capture"):
        captured = [layer(query, cache, plan) for layer in layers]
    assert {layer._site.trace().selected for layer in layers} == {min(times, key=times.get)}
    graph.replay()
    for ours, theirs in zip(captured, eager, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_device_time_is_proportional_to_the_work():
    """Twice the products take twice as long, however slow launching is."""
    catalog = Catalog()
    size = 2048

    def make(facts, device):
        return tuple(torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in "ab")

    def repeat(count):
        def prepare(facts, params):
            def run(a, b):
                for _ in range(count):
                    a = a @ b
                return a

            return run

        return prepare

    catalog.register_op(OpSpec(name="toy", dtypes=("input",), bench_args=make))
    for count in (1, 4):
        catalog.register(
            Impl(
                kernel_id=f"times{count}.toy",
                op="toy",
                when=is_set("dtype.input"),
                prepare=repeat(count),
                priority=4,
                reference=True,
            )
        )
    times = times_of(tuned(catalog).select(KernelQuery.build("toy", dtype="bf16")).trace)
    assert 2.5 < times["times4.toy"] / times["times1.toy"] < 5.5


def test_the_device_is_named_in_the_key(catalog):
    selector = tuned(catalog)
    facts = catalog.entry("rmsnorm").facts(KernelQuery.build("rmsnorm", dtype="bf16"))
    device = Workload.of(catalog.version, facts, selector.device).content["device"]
    assert device["name"] == torch.cuda.get_device_name()
    assert device["cuda"] == torch.version.cuda
    assert device["driver"]
