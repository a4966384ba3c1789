"""Fuzz of the compile options: random programs compute the same before and after the passes."""

import pytest
import torch
from format_weights import quantized
from fuzz_files import is_whole_run, run_cases
from torch.nn import functional

from piper_kernels.fusions.convrot_int8_gelu_ffn import convrot_int8_gelu_ffn_compile_options
from piper_kernels.fusions.convrot_int8_swiglu_ffn import convrot_int8_swiglu_ffn_compile_options
from piper_kernels.fusions.convrot_nvfp4_gelu_ffn import convrot_nvfp4_gelu_ffn_compile_options
from piper_kernels.fusions.convrot_nvfp4_swiglu_ffn import convrot_nvfp4_swiglu_ffn_compile_options
from piper_kernels.fusions.nvfp4_gelu_ffn import nvfp4_gelu_ffn_compile_options
from piper_kernels.fusions.nvfp4_swiglu_ffn import nvfp4_swiglu_ffn_compile_options
from piper_kernels.linear.convrot import convrot_int8_compile_options
from piper_kernels.linear.convrot.nvfp4 import convrot_nvfp4_compile_options
from piper_kernels.linear.nvfp4 import nvfp4_compile_options

WIDTH = 32
OPTIONS = {
    "convrot_int8": (
        convrot_int8_compile_options,
        convrot_int8_gelu_ffn_compile_options,
        convrot_int8_swiglu_ffn_compile_options,
    ),
    "nvfp4": (
        nvfp4_compile_options,
        nvfp4_gelu_ffn_compile_options,
        nvfp4_swiglu_ffn_compile_options,
    ),
    "convrot_nvfp4": (
        convrot_nvfp4_compile_options,
        convrot_nvfp4_gelu_ffn_compile_options,
        convrot_nvfp4_swiglu_ffn_compile_options,
    ),
}
# What rounds differently when an activation is computed by a preparation, in several linears.
TOLERANCE = {"convrot_int8": 0.05, "nvfp4": 0.25, "convrot_nvfp4": 0.25}
STEPS = ("linear", "linear", "linear", "gelu", "silu", "gated", "add", "flat", "relu", "network")


def seeded(draw):
    return torch.Generator().manual_seed(draw.randrange(2**32))


def make_weight(draw, fmt, dtype, rows=WIDTH, features=WIDTH):
    dense = (torch.randn(rows, features, generator=seeded(draw)) / features**0.5).to(dtype)
    act = draw.choice([None, None, torch.tensor(0.03 if fmt == "convrot_int8" else 0.002)])
    return quantized(fmt, dense, act=act)


def make_program(draw, fmt, dtype):
    """Return steps ``(name, sources, weights)`` over a growing list of values, and the outputs."""
    steps, weights = [], []
    for _ in range(draw.randrange(2, 8)):
        name = draw.choice(STEPS)
        sources = [draw.choice([0, len(steps), draw.randrange(len(steps) + 1)]) for _ in range(2)]
        shapes = {"linear": [(WIDTH, WIDTH)], "network": [(64, WIDTH)] * 2 + [(WIDTH, 64)]}
        used = []
        for shape in shapes.get(name, []):
            known = [at for at, (other, _) in enumerate(weights) if other == shape]
            if known and draw.random() < 0.2:
                used.append(draw.choice(known))
                continue
            used.append(len(weights))
            weights.append((shape, make_weight(draw, fmt, dtype, *shape)))
        is_biased = draw.random() < 0.4
        steps.append((name, sources, used, is_biased))
    outputs = sorted({len(steps), *(draw.randrange(len(steps) + 1) for _ in range(2))})
    return steps, [weight for _, weight in weights], outputs


def run_program(steps, outputs, x, weights, bias):
    values = [x]
    for name, (first, second), used, is_biased in steps:
        source, other = values[first], values[second]
        shift = bias if is_biased else None
        if name == "linear":
            value = functional.linear(source, weights[used[0]], shift)
        elif name == "network":
            gate, up = (functional.linear(source, weights[at]) for at in used[:2])
            hidden = functional.silu(gate) * up if is_biased else functional.gelu(
                up, approximate="tanh"
            )  # fmt: skip
            value = functional.linear(hidden, weights[used[2]])
        elif name == "gelu":
            value = functional.gelu(source, approximate="tanh")
        elif name == "silu":
            value = functional.silu(source)
        elif name == "gated":
            value = functional.silu(source) * other
        elif name == "add":
            value = source + other
        elif name == "flat":
            value = source.reshape(-1, source.shape[-1]).view(source.shape)
        else:
            value = torch.relu(source)
        values.append(value)
    return tuple(values[at] * 1 if at == 0 else values[at] for at in outputs)


def make_options(draw, fmt):
    """Chain options, of this format and perhaps of others.

    What they are given stays as it is, and repeating them changes nothing.
    """
    others = [extend for name in OPTIONS if name != fmt for extend in OPTIONS[name]]
    chosen = draw.sample(OPTIONS[fmt], draw.randrange(1, 4)) + draw.sample(others, 1)
    draw.shuffle(chosen)
    options = {"max_autotune": False}
    for extend in chosen:
        before = dict(options)
        extended = extend(options)
        assert options == before
        options = extended
        assert extend(options) == options
    assert options.pop("max_autotune") is False
    return options


def close(found, expected, tolerance):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.isfinite().all()
    if expected.numel():
        distance = (found.double() - expected.double()).norm()
        assert distance <= tolerance * expected.double().norm() + 1e-6


def test_programs_compute_the_same(graph_capture):
    rewritten = []

    def check(draw):
        fmt = draw.choice(sorted(TOLERANCE))
        dtype = draw.choice([torch.float32, torch.bfloat16])
        steps, weights, outputs = make_program(draw, fmt, dtype)
        lead = draw.choice([(5,), (2, 3), (1,), (33,)])
        x = torch.randn(*lead, WIDTH, generator=seeded(draw)).to(dtype)
        bias = torch.randn(WIDTH, generator=seeded(draw))
        options = make_options(draw, fmt)

        def program(x, bias, *weights):
            return run_program(steps, outputs, x, weights, bias)

        found, capture = graph_capture.run(program, x, bias, *weights, options=options)
        with torch.no_grad():
            expected = program(x, bias, *weights)
        for one, other in zip(found, expected, strict=True):
            close(one, other, TOLERANCE[fmt])
        if capture.graph_modules:
            capture.graph_modules[-1].graph.lint()
            names = " ".join(capture.targets)
            rewritten.append("prepare_input" in names or "ffn" in names)

    run_cases("compile", 0.03, check, __file__)
    assert not is_whole_run() or any(rewritten)


def attention_case(draw, dense):
    """Return the fields of a model of attention between projections."""
    head_dim = draw.choice([64, 64, 128])
    biases = tuple(draw.choice([None, None, torch.float16, torch.float32]) for _ in range(5))
    given = {
        "batch": draw.choice([1, 2]),
        "rows": draw.choice([65, 128, 192, 193]),
        "features": draw.choice([64, 128]),
        "head_dim": head_dim,
        "rotary": draw.choice([32, 48, head_dim]),
        "dtype": draw.choice([torch.float16, torch.bfloat16]),
        "query_norm": draw.random() < 0.7,
        "key_norm": draw.random() < 0.7,
        "biases": biases,
        "outputs": draw.choice([None, 16, 40]),
    }
    if dense:
        given |= {"dense": True, "is_causal": draw.random() < 0.5}
        return given | {"kv_heads": draw.choice([None, 1])}
    given |= {"routing": draw.choice(["minmax", "mean"]), "ratios": (1.0, 1.0), "key_blocks": 1}
    return given | {"coarse": draw.random() < 0.5, "query_blocks": draw.choice([None, 0, 1])}


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_attention_between_projections_computes_the_same(monkeypatch, projected_attention, kind):
    from piper_kernels.fusions import convrot_int8_piper, convrot_int8_sparse_piper
    from piper_kernels.fusions.convrot_int8_piper import _compile as dense_compile
    from piper_kernels.fusions.convrot_int8_sparse_piper import _compile as sparse_compile

    for module in (dense_compile, sparse_compile):
        monkeypatch.setattr(module, "supports_target", lambda *_: (True, ""))
    fused = []

    def check(draw):
        model = projected_attention.Model(**attention_case(draw, kind == "dense"))
        if kind == "dense":
            options = convrot_int8_piper.convrot_int8_piper_compile_options(
                fuse_output=draw.random() < 0.5
            )
        else:
            options = convrot_int8_sparse_piper.convrot_int8_sparse_piper_compile_options()
        graph = projected_attention.trace(model, options)
        fused.append("attention" in " ".join(graph.targets))
        expected = model.eager()
        close(graph(), expected, 0.06)

    run_cases(f"compile-{kind}", 0.015, check, __file__)
    assert not is_whole_run() or any(fused)
