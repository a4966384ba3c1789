"""Inputs of measurements: every row that can run here runs on what is made from its facts."""

import pytest
import torch

from phyai.dispatch import KernelQuery, Selector
from phyai.dispatch.bench_inputs import BenchInputs
from phyai.dispatch.catalog import build_catalog
from phyai.kernels.bench import random_tensor
from phyai.kernels.bench_gemm import gemm_inputs, random_layer, spec_of
from phyai_quant import QuantScheme, TensorQuant, materialize

CATALOG = build_catalog()
CPU = torch.device("cpu")


def facts_of(op, **query):
    return CATALOG.entry(op).facts(KernelQuery.build(op, device="cpu", **query))


def run(op, **query):
    """Calls the chosen row on the benchmark's inputs; returns the arguments and the result."""
    made = CATALOG.spec(op).bench_args(facts_of(op, **query), CPU)
    inputs = made if isinstance(made, BenchInputs) else BenchInputs(made)
    selection = Selector(CATALOG, device="cpu").select(KernelQuery.build(op, **query))
    return inputs, selection.execute(*inputs.args, **inputs.kwargs)


@pytest.mark.parametrize(("gated", "width"), [(True, 10), (False, 5)])
def test_activation(gated, width):
    inputs, out = run(
        "activation",
        dtype="bf16",
        dims={"tokens": 3, "hidden": 5},
        attrs={"activation": "silu", "gated": gated},
    )
    assert inputs.args[0].shape == (3, width)
    assert (out.shape, out.dtype) == ((3, 5), torch.bfloat16)


def test_rope_turns_at_the_positions_of_its_cache():
    inputs, (turned, key) = run(
        "rope",
        dtype="fp32",
        dims={"tokens": 5, "head_dim": 8, "rotary_dim": 4, "heads_q": 3, "heads_k": 1},
        attrs={"rope_type": "default", "interleave": False},
    )
    positions, q, k, cache = inputs.args
    assert (cache.shape, cache.dtype) == ((5, 4), torch.float32)
    assert int(positions.max()) < cache.shape[0]
    assert (turned.shape, key.shape) == (q.shape, k.shape)
    torch.testing.assert_close(turned.norm(), q.norm())


def test_modulate():
    inputs, out = run(
        "modulate",
        dtype={"input": "bf16", "scale": "fp32", "shift": "fp32"},
        dims={"batch": 2, "tokens": 3, "hidden": 5},
    )
    assert [tuple(value.shape) for value in inputs.args] == [(2, 3, 5), (2, 5), (2, 5)]
    assert out.shape == (2, 3, 5)


@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_embedding_stays_inside_its_shard(ids):
    inputs, out = run(
        "embedding",
        dtype={"input": ids, "weight": "bf16"},
        dims={"tokens": 7, "embedding_dim": 3},
        attrs={"shard_start": 100, "shard_end": 257152},
    )
    numbers, table, start, end = inputs.args
    assert (start, end, table.shape[0]) == (100, 32868, 32768)
    assert int(numbers.min()) >= start
    assert int(numbers.max()) < end
    assert bool((out != 0).any(-1).all())


def test_embedding_of_other_ids_has_no_inputs():
    with pytest.raises(NotImplementedError, match="'uint8'; allowed: int32, int64"):
        run(
            "embedding",
            dtype={"input": "uint8", "weight": "bf16"},
            dims={"tokens": 7, "embedding_dim": 3},
            attrs={"shard_start": 0, "shard_end": 8},
        )


def test_adaptive_norms():
    dims = {"tokens": 3, "hidden": 5, "cond_dim": 5}
    inputs, (out, gate) = run(
        "adarmsnorm", dtype={"input": "bf16", "modulation": "fp32"}, dims=dims
    )
    assert inputs.args[1].shape == (1, 15)
    assert (out.shape, gate.shape) == ((3, 5), (1, 5))
    dtypes = {"input": "bf16", "residual": "bf16", "gate": "bf16", "modulation": "fp32"}
    _, (out, total, gate) = run("adarmsnorm_add", dtype=dtypes, dims=dims)
    assert (out.shape, total.shape, gate.shape) == ((3, 5), (3, 5), (1, 5))


@pytest.mark.parametrize("first", [True, False])
def test_channel_l2_norm(first):
    inputs, out = run(
        "channel_l2_norm",
        dtype={"input": "bf16", "weight": "fp32", "bias": "fp32", "compute": "fp32"},
        dims={"channels": 6},
        attrs={"channel_first": first, "bias": True, "fused_compatible": first},
    )
    assert inputs.kwargs == {"channel_first": first, "compute_dtype": torch.float32}
    assert out.shape == ((1, 6, 64, 64) if first else (1, 64, 64, 6))


def test_causal_conv():
    inputs, (out,) = run(
        "causal_conv",
        dtype="fp32",
        dims={"tokens": 9, "channels": 4, "kernel": 3},
        attrs={"activation": "silu", "split": False},
    )
    assert inputs.args[1].shape == (4, 3)
    assert out.shape == (9, 4)


def quant(dtype, granularity="per_channel", block=None, **options):
    options.setdefault("micro_scaled", dtype in ("nvfp4", "mxfp4"))
    granularity = granularity if block is None else "block"
    return TensorQuant(dtype, granularity, block_shape=block, **options)


TOKEN = {dtype: quant(dtype, dynamic=True) for dtype in ("int8", "fp8_e4m3", "fp8_e5m2")}
NVFP4, NVFP4_INPUT = quant("nvfp4", block=(1, 16)), quant("nvfp4", block=(1, 16), dynamic=True)
GROUPS = quant("int4", block=(1, 32))
SCHEMES = {
    "fp8": QuantScheme(quant("fp8_e4m3")),
    "fp8_tensor_static": QuantScheme(
        quant("fp8_e4m3", "per_tensor"), quant("fp8_e4m3", "per_tensor")
    ),
    "fp8_tokens": QuantScheme(quant("fp8_e4m3"), TOKEN["fp8_e4m3"]),
    "fp8_e5m2": QuantScheme(quant("fp8_e5m2")),
    "fp8_block": QuantScheme(
        quant("fp8_e4m3", block=(128, 128)), quant("fp8_e4m3", block=(1, 128), dynamic=True)
    ),
    "mxfp8": QuantScheme(quant("fp8_e4m3", block=(1, 32), micro_scaled=True)),
    "int8_tokens": QuantScheme(quant("int8"), TOKEN["int8"]),
    "int8_asymmetric": QuantScheme(
        quant("int8", symmetric=False), quant("int8", dynamic=True, symmetric=False)
    ),
    "int4_packed": QuantScheme(GROUPS),
    "int8_packed": QuantScheme(quant("int8", block=(1, 32))),
    "nvfp4": QuantScheme(NVFP4),
    "nvfp4_input": QuantScheme(NVFP4, NVFP4_INPUT),
    "mxfp4": QuantScheme(quant("mxfp4", block=(1, 32))),
    "convrot_int8": QuantScheme(quant("int8", rotation_group=64), TOKEN["int8"], online=True),
    "convrot_nvfp4": QuantScheme(
        quant("nvfp4", block=(1, 16), rotation_group=16), NVFP4_INPUT, online=True
    ),
    "humming_w4a16": QuantScheme(GROUPS, online=True),
    "humming_w4a8": QuantScheme(GROUPS, TOKEN["int8"], online=True),
    "humming_w8a8": QuantScheme(quant("int8", block=(1, 128)), TOKEN["int8"], online=True),
    "humming_fp8_block": QuantScheme(
        quant("fp8_e4m3", block=(128, 128)), TOKEN["fp8_e4m3"], online=True
    ),
    "humming_nvfp4": QuantScheme(NVFP4, online=True),
}


def gemm_query(spec, n=128, k=256):
    return {
        "dtype": {"input": "fp32", "output": "fp32", "weight": "int8"},
        "quant": spec.physical_signature,
        "dims": {"M": 3, "N": n, "K": k},
    }


@pytest.mark.parametrize("name", SCHEMES)
def test_a_random_layer_of_every_format_is_found_and_multiplied(name):
    spec = materialize(SCHEMES[name])
    inputs, out = run("gemm", **gemm_query(spec))
    layer, x, bias = inputs.args
    assert layer.spec.spec_id == spec.spec_id
    assert bias is None
    assert (x.shape, out.shape) == ((3, 256), (3, 128))
    assert bool(out.isfinite().all())
    assert float(out.norm()) > 0


@pytest.mark.parametrize("name", [name for name in SCHEMES if name.startswith("humming")])
def test_a_gpu_query_finds_the_packed_format(name, monkeypatch):
    monkeypatch.setattr("phyai_quant.specs.humming.find_spec", lambda _: True)
    spec = materialize(SCHEMES[name], 90)
    assert spec.physical_signature.layout == "humming"
    assert spec_of(facts_of("gemm", **gemm_query(spec)), 90).spec_id == spec.spec_id
    with pytest.raises(NotImplementedError, match="layout 'humming'"):
        spec_of(facts_of("gemm", **gemm_query(spec)), None)


def test_blackwell_tiles_are_found():
    spec = materialize(SCHEMES["nvfp4_input"], 100)
    found = spec_of(facts_of("gemm", **gemm_query(spec)), 100)
    assert found.physical_signature.layout == "128x4"
    layer = random_layer(found, (128, 256), torch.bfloat16, CPU)
    assert bool(found.dequantize_weight(layer).isfinite().all())


def test_formats_that_no_scheme_has_are_refused():
    facts = facts_of(
        "gemm",
        dtype={"input": "bf16", "output": "bf16"},
        quant={"format": "int8", "layout": "unheard"},
        dims={"M": 1, "N": 32, "K": 32},
    )
    with pytest.raises(NotImplementedError, match="format 'int8', layout 'unheard'"):
        gemm_inputs(facts, CPU)


def test_shapes_that_do_not_fit_the_format_are_refused():
    spec = materialize(SCHEMES["humming_w4a16"])
    with pytest.raises(ValueError, match="K = 40"):
        gemm_inputs(facts_of("gemm", **gemm_query(spec, k=40)), CPU)


def test_random_values_are_the_same_every_time():
    first, second = (random_tensor((3, 4), "bf16", CPU) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert 0.02 < float(first.float().std()) < 0.3
