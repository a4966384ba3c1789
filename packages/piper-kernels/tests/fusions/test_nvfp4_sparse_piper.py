"""Which graphs become NVFP4 projections fused with sparse attention, and what those compute."""

import pytest
import torch
from torch.nn import functional

from piper_kernels.fusions.attention import nvfp4, windows
from piper_kernels.fusions.convrot_nvfp4_sparse_piper import (
    convrot_nvfp4_sparse_piper_compile_options,
)
from piper_kernels.fusions.nvfp4_sparse_piper import (
    _compile,
    _output_ops,
    _projections,
    nvfp4_sparse_piper_compile_options,
)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SCALE, SMALL = torch.tensor(0.002), torch.tensor(0.0005)
STATIC = (SCALE, SCALE, SCALE, SMALL, SCALE)
OPTIONS = {
    "nvfp4": nvfp4_sparse_piper_compile_options,
    "convrot_nvfp4": convrot_nvfp4_sparse_piper_compile_options,
}
KEY, VALUE, QUERY = (f"nvfp4_sparse_piper_project_{name}" for name in ("key", "value", "query"))
ATTENTION = "sparse_piper_attention_from_quantized"
COARSE = "sparse_piper_attention_with_coarse_residual_from_quantized"
PREPARED = "nvfp4_linear_prepared"
TOLERANCE = 0.025
# The attention is quantized to four bits in front of the last linear.
OUTPUT_TOLERANCE = 0.1


@pytest.fixture(autouse=True)
def every_target(monkeypatch):
    monkeypatch.setattr(_compile, "supports_target", lambda *_: (True, ""))


@pytest.fixture
def fuse(projected_attention):
    def run(fmt, model=None, **given):
        if model is None:
            model = projected_attention.Model(fmt=fmt, **given)
        return model, projected_attention.trace(model, OPTIONS[fmt]())

    return run


LENGTHS = {"lengths": (64, 17, 51)}
RESIDUAL = {"coarse": True, "coarse_key_blocks": 3}
VARIANTS = {
    "plain": {},
    "coarse with lengths": {**RESIDUAL, **LENGTHS, "routing": "mean", "query_blocks": 1},
    "projected gate": {**RESIDUAL, "projected_gate": True, "biases": (F32, BF16, F16, F32, F32)},
    "ragged": {"rows": 193, "query_norm": False, "key_norm": False},
    "static": {"scales": STATIC},
    "float32": {"dtype": F32, "head_dim": 128, "rotary": 96},
}


@pytest.mark.parametrize("fmt", OPTIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_regions_are_fused(fuse, projected_attention, fmt, variant):
    given = VARIANTS[variant]
    model, graph = fuse(fmt, **given)
    value = f"{VALUE}_with_block_means" if model.coarse else VALUE
    prepare = f"{fmt}_prepare_input"
    gate = [PREPARED] if model.projected_gate else []
    attention = COARSE if model.coarse else ATTENTION
    assert sorted(graph.targets) == sorted([prepare, KEY, value, QUERY, *gate, attention])
    rows, expected = model.valid_rows, model.eager()
    assert projected_attention.relative_error(graph(), expected, rows) < TOLERANCE

    model, whole = fuse(fmt, outputs=48, **given)
    assert whole.targets == [prepare, KEY, value, QUERY, f"{fmt}_sparse_piper_attention_output"]
    actual, expected = whole(), model.eager()
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert projected_attention.relative_error(actual, expected, rows) < OUTPUT_TOLERANCE
    if model.lengths is None:  # the dynamic scale covers rows that do not exist too
        with torch.no_grad():
            assert torch.equal(actual, model.linear("out", graph()))


@pytest.mark.parametrize("fmt", OPTIONS)
@pytest.mark.parametrize("outputs", [48, 128, 160])
def test_chunks_of_a_dynamic_output_share_one_scale(fuse, monkeypatch, fmt, outputs):
    _, graph = fuse(fmt, rows=520, outputs=outputs, **RESIDUAL, projected_gate=True)
    whole = graph()
    monkeypatch.setattr(_output_ops, "NVFP4_WINDOW_ROWS", 256)
    assert graph.change_chunk_rows(128) == windows.NVFP4_DYNAMIC_CHUNK_ROWS
    assert torch.equal(graph(), whole)
    assert outputs == whole.shape[-1]


def test_a_narrow_dynamic_result_takes_the_place_of_the_attention(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    attention = torch.randn(1, 300, 64, generator=generator).bfloat16()
    for outputs, reused in ((64, True), (32, True), (80, False)):
        from piper_kernels.fusions._ffn.nvfp4 import Projection
        from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

        dense = torch.randn(outputs, 64, generator=generator).bfloat16()
        weight = PiperNVFP4Tensor.from_hp(dense, is_swizzled_scales=True)
        linear = Projection(weight.qdata, weight.scale, None, None, None, True, False)
        given = attention.clone()
        result = nvfp4.project_with_one_scale(given, linear, 128)
        assert result.shape == (1, 300, outputs)
        assert (result.data_ptr() == given.data_ptr()) == reused
        expected = nvfp4.project_with_one_scale(attention.clone(), linear, 512)
        assert torch.equal(result, expected)


@pytest.mark.parametrize("fmt", OPTIONS)
def test_static_windows_do_not_change_the_result(fuse, fmt):
    model, graph = fuse(fmt, rows=520, outputs=48, scales=STATIC, **RESIDUAL)
    whole = graph()
    assert graph.change_chunk_rows(128) == windows.NVFP4_WINDOW_ROWS
    assert torch.equal(graph(), whole)
    assert model.rows == 520


def test_a_plain_output_behind_rotated_projections(fuse, projected_attention):
    model = projected_attention.Model(fmt="convrot_nvfp4", outputs=48)
    dense = (projected_attention.rand(48, 128, seed=4) / 11).bfloat16()
    model.weights["out"] = projected_attention.quantize("nvfp4", dense)
    model, graph = fuse("convrot_nvfp4", model)
    (call,) = [n for n in graph.nodes if "attention_output" in str(n.target)]
    names = [argument.name for argument in call.target._schema.arguments]
    assert call.args[names.index("group_size")] == 0
    error = projected_attention.relative_error(graph(), model.eager())
    assert error < OUTPUT_TOLERANCE


@pytest.mark.parametrize("case", ["batch", "scales", "escaping"])
def test_other_graphs_keep_their_attention(fuse, projected_attention, case):
    class Escaping(projected_attention.Model):
        def operands(self, *args):
            self.kept = super().operands(*args)
            return self.kept

        def __call__(self, *args):
            return super().__call__(*args), self.kept[1]

    given = {
        "batch": {"batch": 2},
        "scales": {"scales": (SCALE, None, torch.tensor(0.003), None, None)},
    }
    model = (
        Escaping(fmt="nvfp4", outputs=48)
        if case == "escaping"
        else projected_attention.Model(fmt="nvfp4", outputs=48, **given[case])
    )
    _, graph = fuse("nvfp4", model)
    if case == "scales":  # every operand may have its own preparation
        assert graph.targets.count("nvfp4_prepare_input") == 3
        assert graph.targets[-1] == "nvfp4_sparse_piper_attention_output"
    else:
        assert "sparse_piper_attention" in graph.targets
        assert KEY not in graph.targets


def test_means_of_inputs(projected_attention):
    """The mean of values is the projection of the mean of decoded inputs."""
    x = projected_attention.rand(1, 200, 64, seed=3, dtype=BF16)
    dense = (projected_attention.rand(128, 64, seed=4) / 8).bfloat16()
    weight = projected_attention.quantize("nvfp4", dense)
    prepared = torch.ops.piper_kernels.nvfp4_prepare_input(x, None, True)
    bias = projected_attention.rand(128, seed=5)
    codes = torch.ops.piper_kernels.nvfp4_sparse_piper_project_value(
        *prepared, weight.qdata, weight.scale, weight.per_tensor_scale, None, bias, head_dim=64
    )
    with torch.no_grad():
        values = functional.linear(x.float(), projected_attention.quantize("nvfp4", dense.float()),
                                   bias)  # fmt: skip
    expected = values.mean(1).view(1, 2, 64)
    assert torch.allclose(codes[2], expected, atol=1e-3)
    chunk = _projections.PackedInput(*prepared).window(slice(128, 200))
    assert chunk.qdata.shape == (72, 32)
    assert chunk.scale.data_ptr() == prepared[1][32:].data_ptr()
