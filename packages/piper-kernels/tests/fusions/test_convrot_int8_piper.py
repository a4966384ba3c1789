"""Which graphs become projections fused with dense attention, and what those compute."""

import pytest
import torch

from piper_kernels import piper_attention
from piper_kernels.fusions.convrot_int8_piper import _compile, convrot_int8_piper_compile_options

SCALE = torch.tensor(0.03)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
PREPARE = "convrot_int8_prepare_input"
MEAN = "convrot_int8_dequantized_input_mean"
KEY, VALUE, QUERY = (f"convrot_int8_piper_project_{name}" for name in ("key", "value", "query"))
ATTENTION = "piper_attention_from_quantized"
FROM_QUERY = "piper_attention_from_quantized_query"
LINEAR = "convrot_int8_linear"
OUTPUT = "convrot_int8_piper_projected_query_attention_output"
FUSED = [PREPARE, KEY, MEAN, VALUE, QUERY, ATTENTION]
TOLERANCE = 0.025


@pytest.fixture(autouse=True)
def every_target(monkeypatch):
    monkeypatch.setattr(_compile, "supports_target", lambda *_: (True, ""))


@pytest.fixture
def fuse(projected_attention):
    def run(model=None, *, fuse_output=False, **given):
        if model is None:
            model = projected_attention.Model(dense=True, **given)
        options = convrot_int8_piper_compile_options(fuse_output=fuse_output)
        return model, projected_attention.trace(model, options)

    return run


VARIANTS = {
    "plain": {},
    "causal": {"is_causal": True, "rows": 193},
    "grouped heads": {"kv_heads": 1, "batch": 2},
    "biases": {"biases": (F32, BF16, F16, F32, None)},
    "weightless": {"query_norm": False, "head_dim": 128, "rotary": 128},
    "float16": {"dtype": F16, "rows": 65},
    "few rows": {"rows": 3},
    "static": {"scales": (SCALE, SCALE, None, None, None)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_regions_are_fused(fuse, projected_attention, variant):
    given = VARIANTS[variant]
    model, graph = fuse(outputs=40, **given)
    targets = [name for name in FUSED if name != MEAN or not model.is_causal]
    if "scales" in given:
        targets.insert(2, PREPARE)
    assert graph.targets == [*targets, LINEAR]
    expected = model.eager()
    assert projected_attention.relative_error(graph(), expected) < TOLERANCE
    _, windowed = fuse(model, fuse_output=True)
    assert windowed.targets == [*(name for name in targets if name not in (QUERY, ATTENTION)),
                                OUTPUT]  # fmt: skip
    assert torch.equal(windowed(), graph())


def test_keys_and_values_of_another_input(fuse, projected_attention):
    class Cross(projected_attention.Model):
        def operands(self, x, cos, sin):
            query, _, _ = super().operands(x, cos, sin)
            other = self.gate.flatten(2)[..., : self.features]
            _, key, value = super().operands(other, self.key_cos, self.key_sin)
            return query, key, value

        def __call__(self, x, cos, sin, gate, other):
            self.gate = gate
            self.key_cos, self.key_sin = other
            return super().__call__(x, cos, sin, gate, None)

        def eager(self):
            with torch.no_grad():
                return self(*self.given)

    model = Cross(dense=True, rows=65, outputs=40)
    other = projected_attention.Model(dense=True, rows=130, features=64, heads=1)
    gate = other.x[:, :, None].contiguous()
    model.given = (model.x, model.cos, model.sin, gate, (other.cos, other.sin))
    options = convrot_int8_piper_compile_options(fuse_output=True)
    graph = projected_attention.trace(model, options, args=model.given)
    assert graph.targets == [PREPARE, KEY, MEAN, VALUE, PREPARE, OUTPUT]
    assert projected_attention.relative_error(graph(), model.eager()) < TOLERANCE


def test_unsupported_keys_leave_the_queries_alone_fused(fuse, projected_attention):
    class Plain(projected_attention.Model):
        def operands(self, x, cos, sin):
            query, key, value = super().operands(x, cos, sin)
            return query, torch.tanh(key), value

    model, graph = fuse(Plain(dense=True, outputs=40), fuse_output=True)
    assert QUERY in graph.targets
    assert FROM_QUERY in graph.targets
    assert KEY not in graph.targets
    assert graph.targets[-1] == LINEAR
    assert projected_attention.relative_error(graph(), model.eager()) < TOLERANCE


def test_heads_may_be_transposed_behind_the_rotation(fuse, projected_attention):
    class Late(projected_attention.Model):
        def operands(self, x, cos, sin):
            heads = [self.linear(n, x).unflatten(-1, (-1, self.head_dim)) for n in "qkv"]
            turned = [
                projected_attention.rope(projected_attention.rms_norm(h, self.norms[n]), cos, sin)
                for h, n in zip(heads, "qk", strict=False)
            ]
            return [part.transpose(1, 2) for part in (*turned, heads[2])]

    model, graph = fuse(Late(dense=True, outputs=40), fuse_output=True)
    assert graph.targets == [PREPARE, KEY, MEAN, VALUE, OUTPUT]
    assert projected_attention.relative_error(graph(), model.eager()) < TOLERANCE


@pytest.mark.parametrize("case", ["query is used", "no rotation", "attention is used"])
def test_other_graphs(fuse, projected_attention, case):
    class Other(projected_attention.Model):
        def operands(self, x, cos, sin):
            query, key, value = super().operands(x, cos, sin)
            if case == "no rotation":
                query = self.linear("q", x).unflatten(-1, (-1, 64)).transpose(1, 2)
            return query, key, value

        def __call__(self, x, cos, sin, gate, lengths):
            query, key, value = self.operands(x, cos, sin)
            attention = piper_attention(query, key, value)
            merged = attention.transpose(1, 2).flatten(2)
            kept = {"query is used": query, "attention is used": merged}.get(case)
            return self.linear("out", merged), kept

    model, graph = fuse(Other(dense=True, outputs=40), fuse_output=True)
    assert OUTPUT not in graph.targets
    if case == "attention is used":
        assert graph.targets == [*FUSED, LINEAR]
    else:
        assert "piper_attention" in graph.targets
        assert QUERY not in graph.targets
    actual, expected = graph()[0], model.eager()[0]
    assert projected_attention.relative_error(actual, expected) < TOLERANCE


def test_one_graph_serves_changing_lengths(projected_attention, graph_capture):
    class Module(projected_attention.Module):
        def forward(self, x, cos, sin):
            return self.model(x, cos, sin, None, None)

    torch._dynamo.reset()
    module = Module(projected_attention.Model(dense=True, outputs=40))
    options = convrot_int8_piper_compile_options(fuse_output=True)
    capture = graph_capture.GraphCapture(options)
    compiled = torch.compile(module, backend=capture, fullgraph=True)
    for rows in (192, 257, 130):
        args = projected_attention.Model(dense=True, rows=rows).args[:3]
        for dim, tensor in zip((1, 0, 0), args, strict=True):
            torch._dynamo.mark_dynamic(tensor, dim)
        with torch.no_grad():
            actual, expected = compiled(*args), module(*args)
        assert projected_attention.relative_error(actual, expected) < TOLERANCE
    assert len(capture.graph_modules) == 1
    assert capture.targets == [PREPARE, KEY, MEAN, VALUE, OUTPUT]


def test_the_fusion_of_outputs_is_another_pass():
    option = "post_grad_custom_pre_pass"
    plain = convrot_int8_piper_compile_options()[option]
    output = convrot_int8_piper_compile_options(fuse_output=True)[option]
    assert plain[-1] == output[-1]
    assert plain[0] != output[0]
    assert plain[0].uuid() != output[0].uuid()
    assert convrot_int8_piper_compile_options(
        convrot_int8_piper_compile_options(fuse_output=True), fuse_output=True
    ) == {option: output}


def test_targets_without_kernels_are_left_alone(fuse, monkeypatch):
    monkeypatch.undo()
    _, graph = fuse(outputs=40)
    assert "piper_attention" in graph.targets
    usable, reason = _compile.supports_target(torch.device("cpu"), 64, False)
    assert not usable
    assert reason


@pytest.mark.parametrize("is_causal", [False, True])
def test_windows_do_not_change_the_result(fuse, is_causal):
    given = {"rows": 300, "outputs": 40, "is_causal": is_causal, "batch": 2, "kv_heads": 1}
    _, graph = fuse(fuse_output=True, **given)
    whole = graph()
    graph.change_chunk_rows(128)
    assert torch.equal(graph(), whole)
    graph.change_chunk_rows(64)
    with pytest.raises(ValueError, match="positive multiple of 128, got 64"):
        graph()
