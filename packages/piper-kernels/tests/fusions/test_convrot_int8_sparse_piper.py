"""Which graphs become projections fused with sparse attention, and what those compute."""

import pytest
import torch

from piper_kernels.fusions.convrot_int8_sparse_piper import (
    _compile,
    convrot_int8_sparse_piper_compile_options,
)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SCALE, OTHER = torch.tensor(0.03), torch.tensor(0.031)
PREPARE = "convrot_int8_prepare_input"
MEAN = "convrot_int8_dequantized_input_mean"
NAME = "convrot_int8_sparse_piper"
KEY, VALUE, QUERY = (f"{NAME}_project_{operand}" for operand in ("key", "value", "query"))
ATTENTION = "sparse_piper_attention_from_quantized"
COARSE = "sparse_piper_attention_with_coarse_residual_from_quantized"
OUTPUT = f"{NAME}_projected_query_attention_output"
FUSED = [PREPARE, KEY, MEAN, VALUE, QUERY, ATTENTION]
TOLERANCE = 0.025


@pytest.fixture(autouse=True)
def every_target(monkeypatch):
    monkeypatch.setattr(_compile, "supports_target", lambda _device, _head_dim: (True, ""))


@pytest.fixture
def fuse(projected_attention):
    def run(model=None, **given):
        if model is None:
            model = projected_attention.Model(**given)
        options = convrot_int8_sparse_piper_compile_options()
        return model, projected_attention.trace(model, options)

    return run


LENGTHS = {"lengths": (64, 17, 51)}
RESIDUAL = {"coarse": True, "coarse_key_blocks": 3}
VARIANTS = {
    "plain": {},
    "mean routing": {"routing": "mean"},
    "block lengths": LENGTHS,
    "query blocks": {"query_blocks": 1},
    "coarse": RESIDUAL,
    "coarse with lengths": {**RESIDUAL, **LENGTHS, "query_blocks": 2, "routing": "mean"},
    "projected gate": {**RESIDUAL, "projected_gate": True},
    "weightless query": {"query_norm": False},
    "weightless key": {"key_norm": False},
    "weightless": {"query_norm": False, "key_norm": False, "head_dim": 128, "rotary": 128},
    "ragged": {"rows": 193, "batch": 2},
    "one block": {"rows": 65, "key_blocks": 1},
    "biases": {"biases": (F32, BF16, F16, F32, BF16), **RESIDUAL, "projected_gate": True},
    "static": {"scales": (SCALE, SCALE, SCALE, torch.tensor(0.005), SCALE)},
    "float16": {"dtype": F16},
    "float32": {"dtype": F32, "head_dim": 128, "rotary": 96},
    "full keep": {"ratios": (1.0, 1.0)},
}


def plain_targets(model):
    value, attention = VALUE, ATTENTION
    if model.coarse:
        value, attention = f"{VALUE}_with_block_means", COARSE
    gate = ["convrot_int8_linear_prepared"] if model.projected_gate else []
    return [PREPARE, KEY, MEAN, value, QUERY, *gate, attention]


@pytest.mark.parametrize("variant", VARIANTS)
def test_regions_are_fused(fuse, projected_attention, variant):
    model, graph = fuse(**VARIANTS[variant])
    assert graph.targets == plain_targets(model)
    actual, expected = graph(), model.eager()
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    rows = model.valid_rows
    assert projected_attention.relative_error(actual, expected, rows) < TOLERANCE

    whole, graph = fuse(outputs=40, **VARIANTS[variant])
    value = f"{VALUE}_with_block_means" if whole.coarse else VALUE
    assert graph.targets == [PREPARE, KEY, MEAN, value, OUTPUT]
    # The same attention, projected as a whole by the ordinary linear.
    with torch.no_grad():
        chained = whole.linear("out", actual)
    actual, expected = graph(), whole.eager()
    assert actual.dtype == expected.dtype
    assert projected_attention.relative_error(actual, expected, rows) < TOLERANCE
    assert torch.equal(actual[:, rows], chained[:, rows])


@pytest.mark.parametrize(
    ("scales", "preparations"),
    [
        ((SCALE, SCALE, SCALE, None, SCALE), 1),
        ((SCALE, OTHER, OTHER, OTHER, OTHER), 2),
        ((None, SCALE, OTHER, None, None), 3),
        ((None, None, SCALE, None, OTHER), 2),
    ],
)
def test_preparations_are_shared_by_equal_scales_alone(
    fuse, projected_attention, scales, preparations
):
    given = {**RESIDUAL, "projected_gate": True, "scales": scales}
    model, graph = fuse(**given)
    gate_alone = scales[4] is OTHER and scales[0] is None
    assert graph.targets.count(PREPARE) == preparations + gate_alone
    expected = model.eager()
    assert projected_attention.relative_error(graph(), expected) < TOLERANCE
    model, windowed = fuse(outputs=40, **given)
    keys = 1 if scales[1] is scales[2] else 2
    assert windowed.targets.count(PREPARE) == keys
    with torch.no_grad():
        assert torch.equal(windowed(), model.linear("out", graph()))
    call = windowed.find(OUTPUT)
    shared = any(scales[0] is scale for scale in scales[1:3])
    assert (call.args[0].meta["val"].dtype == torch.int8) == shared


def test_the_graph_equals_the_explicit_operators(fuse):
    model, graph = fuse(**RESIDUAL, **LENGTHS, biases=(F32, None, BF16, None, None), rows=192)
    ops = torch.ops.piper_kernels
    q, k, v = (model.weights[name] for name in "qkv")
    qdata, scale = ops.convrot_int8_prepare_input(model.x, 64, None, None)
    lengths, eps = model.block_lengths, 1e-5
    tables = (model.cos, model.sin, eps)
    query = getattr(ops, QUERY)(
        qdata, scale, q.qdata, q.scale, model.norms["q"], *tables, 64**-0.5, 0, lengths,
        model.bias["q"],
    )  # fmt: skip
    key = getattr(ops, KEY)(
        qdata, scale, k.qdata, k.scale, model.norms["k"], *tables, 0, lengths
    )  # fmt: skip
    mean = ops.convrot_int8_dequantized_input_mean(qdata, scale, lengths)
    *value, block_mean = getattr(ops, f"{VALUE}_with_block_means")(
        qdata, scale, mean, v.qdata, v.scale, lengths, model.bias["v"], head_dim=64
    )
    expected = getattr(ops, COARSE)(
        *query, *key, *value, block_mean, model.gate, [500_000, 1_000_000], 2, 192, 0, 0.125,
        lengths, 3, output_dtype=BF16,
    )  # fmt: skip
    assert torch.equal(graph(), expected.flatten(2))


def test_strided_tables_are_copied(fuse, projected_attention):
    model = projected_attention.Model()
    model.cos, model.sin = torch.stack((model.cos, model.sin), -1).unbind(-1)
    model, graph = fuse(model)
    assert graph.targets == FUSED
    clones = [node for node in graph.nodes if "clone" in str(node.target)]
    assert len(clones) == 4
    assert projected_attention.relative_error(graph(), model.eager()) < TOLERANCE


def escaping(module, name):
    """Return a model that returns an operand besides its result."""

    class Escaping(module.Model):
        def attend(self, query, key, value, *rest):
            self.kept = {"query": query, "key": key, "value": value}
            return super().attend(query, key, value, *rest)

        def __call__(self, *args):
            return super().__call__(*args), self.kept[name]

    return Escaping(outputs=40)


def with_operands(module, change):
    """Return a model whose operands are ``change(module, model, x, tables, query, key, value)``."""

    class Changed(module.Model):
        def operands(self, x, *tables):
            return change(module, self, x, tables, *super().operands(x, *tables))

        def by_heads(self, name, x):
            return self.linear(name, x).unflatten(-1, (-1, self.head_dim))

    return Changed(outputs=40)


def no_norm(module, model, x, tables, _query, key, value):
    return module.rope(model.by_heads("q", x), *tables), key, value


def no_rotation(module, model, x, _tables, query, _key, value):
    return query, module.rms_norm(model.by_heads("k", x), None), value


def activated_values(_module, _model, _x, _tables, query, key, value):
    return query, key, torch.relu(value)


def narrow_tables(module):
    model = module.Model(outputs=40)
    model.cos, model.sin = model.cos.bfloat16(), model.sin.bfloat16()
    return model


def strided_input(module):
    model = module.Model(outputs=40)
    model.x = module.rand(1, 64, 192, dtype=BF16).mT
    return model


def strided_norm(module):
    model = module.Model(outputs=40)
    model.norms["q"] = module.rand(128).bfloat16()[::2]
    return model


def group_sizes(module):
    model = module.Model(outputs=40)
    dense = module.rand(128, 64, seed=2, dtype=BF16)
    model.weights["k"] = module.quantize("convrot_int8", dense, group_size=16)
    return model


NEGATIVES = {
    "escaping query": lambda module: escaping(module, "query"),
    "escaping key": lambda module: escaping(module, "key"),
    "escaping value": lambda module: escaping(module, "value"),
    "no norm": lambda module: with_operands(module, no_norm),
    "activated values": lambda module: with_operands(module, activated_values),
    "no rotation": lambda module: with_operands(module, no_rotation),
    "grouped heads": lambda module: module.Model(outputs=40, kv_heads=1),
    "tables of bfloat16": narrow_tables,
    "strided input": strided_input,
    "strided norm": strided_norm,
    "group sizes": group_sizes,
}
"""Models that differ from the pattern in one place, made from ``projected_attention``."""


@pytest.mark.parametrize("case", NEGATIVES)
def test_other_graphs_keep_their_attention(fuse, projected_attention, case):
    _, graph = fuse(NEGATIVES[case](projected_attention))
    assert "sparse_piper_attention" in graph.targets
    assert not any(name.startswith(NAME) for name in graph.targets)


def test_an_escaping_attention_keeps_its_linear(fuse, projected_attention):
    class Escaping(projected_attention.Model):
        def __call__(self, x, cos, sin, gate, lengths):
            merged = self.attend(*self.operands(x, cos, sin), x, gate, lengths).flatten(2)
            return self.linear("out", merged), merged

    model, graph = fuse(Escaping(outputs=40))
    assert graph.targets == [*FUSED, "convrot_int8_linear"]
    for actual, expected in zip(graph(), model.eager(), strict=True):
        assert projected_attention.relative_error(actual, expected) < TOLERANCE


@pytest.mark.parametrize("case", ["routing", "query", "gate is used"])
def test_other_residuals_stay_outside(fuse, projected_attention, case):
    from piper_kernels import sparse_piper_coarse_residual

    class Other(projected_attention.Model):
        def attend(self, query, key, value, x, gate, lengths):
            fine = self.attention(query, key, value, sparse_key_blocks=2)
            other = key if case == "query" else query
            routing = "mean" if case == "routing" else "minmax"
            coarse = sparse_piper_coarse_residual(
                other, key, value, gate, routing=routing, coarse_scale=0.1
            )
            return fine + coarse + (coarse if case == "gate is used" else 0)

    _, graph = fuse(Other(outputs=40))
    assert "sparse_piper_attention" in graph.targets
    assert "sparse_piper_coarse_residual" in graph.targets
    assert not any(name.startswith(NAME) for name in graph.targets)


def test_targets_without_kernels_are_left_alone(fuse, monkeypatch):
    monkeypatch.undo()
    _, graph = fuse(outputs=40)
    assert "sparse_piper_attention" in graph.targets
    assert _compile.supports_target(torch.device("cpu"), 64)[0] is False
    assert _compile.supports_target(torch.device("cpu"), 64)[1]
