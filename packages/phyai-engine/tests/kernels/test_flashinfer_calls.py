"""How the FlashInfer rows call the library, with a stand-in that computes the reference.

The stand-in checks what the library demands of its arguments: 2-D contiguous rows, host index
tensors, one plan for all layers. The library itself runs in ``test_flashinfer_gpu.py``.
"""

import gc
import sys
from types import ModuleType

import pytest
import torch

from phyai.dispatch.catalog import build_catalog
from phyai.kernels.flashinfer_attention import PagedRunner, RaggedRunner, workspace_bytes
from phyai.runtime.paged import PagedPlan
from phyai.runtime.streams import side_by_side


class FakePaged:
    made = 0

    def __init__(self, workspace, layout, *, backend):
        assert workspace.dtype == torch.uint8
        assert int(workspace[:4096].max()) == 0
        assert layout == "NHD"
        type(self).made += 1
        self.backend, self.plans = backend, 0

    def plan(self, qo, kv, indices, last, heads, kv_heads, dim, page, **options):
        assert [t.device.type for t in (qo, kv, last)] == ["cpu"] * 3
        assert options["causal"] is False
        self.plans += 1
        self.state = (qo.tolist(), kv.tolist(), indices, last.tolist(), page, options["sm_scale"])
        self.shape = (heads, kv_heads, dim)

    def run(self, q, cache):
        qo, kv, indices, last, page, scale = self.state
        heads, kv_heads, dim = self.shape
        assert q.shape[1:] == (heads, dim)
        out = []
        for r in range(len(last)):
            pages = indices[kv[r] : kv[r + 1]]
            keys = (len(pages) - 1) * page + last[r]
            k, v = (side[pages].reshape(-1, kv_heads, dim)[:keys] for side in cache)
            k, v = (side.repeat_interleave(heads // kv_heads, 1) for side in (k, v))
            rows = q[qo[r] : qo[r + 1]]
            weights = torch.einsum("qhd,khd->hqk", rows, k).mul(scale).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(out)


class FakeRagged(FakePaged):
    def plan(self, qo, kv, heads, kv_heads, dim, **options):
        self.plans += 1
        self.state = (qo.tolist(), kv.tolist(), options["sm_scale"])
        self.shape = (heads, kv_heads, dim)

    def run(self, q, k, v):
        qo, kv, scale = self.state
        group = self.shape[0] // self.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = []
        for r in range(len(qo) - 1):
            keys = slice(kv[r], kv[r + 1])
            logits = torch.einsum("qhd,khd->hqk", q[qo[r] : qo[r + 1]], k[keys])
            out.append(torch.einsum("hqk,khd->qhd", logits.mul(scale).softmax(-1), v[keys]))
        return torch.cat(out)


@pytest.fixture
def flashinfer(monkeypatch):
    FakePaged.made = FakeRagged.made = 0
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = FakePaged
    module.BatchPrefillWithRaggedKVCacheWrapper = FakeRagged
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("phyai.kernels.flashinfer_attention.workspace_bytes", lambda *shape: 4096)
    return module


def paged_plan():
    slots = [torch.tensor([4, 0, 9]), torch.tensor([1])]
    return PagedPlan.from_slots([2, 3], slots, "cpu")


def inputs():
    torch.manual_seed(0)
    return torch.randn(5, 4, 8), torch.randn(10, 1, 2, 8), torch.randn(10, 1, 2, 8)


def test_paged_agrees_with_the_reference(flashinfer, row):
    plan, tensors = paged_plan(), inputs()
    out = PagedRunner("fa2")(*tensors, plan, scale=0.3)
    expected = row("eager.attention_paged")(*tensors, plan, scale=0.3)
    torch.testing.assert_close(out, expected)


def test_paged_last_page_is_partly_used(flashinfer, row):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 8), torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2, 8)
    plan = PagedPlan(
        qo_indptr=torch.tensor([0, 2], dtype=torch.int32),
        kv_indptr=torch.tensor([0, 2], dtype=torch.int32),
        kv_indices=torch.tensor([2, 0], dtype=torch.int32),
        kv_last_page_len=torch.tensor([3], dtype=torch.int32),
        qo_lens=(2,),
        kv_lens=(7,),
        page_size=4,
    )
    out = PagedRunner("fa2")(q, k, v, plan, scale=0.3)
    expected = row("eager.attention_paged")(q, k, v, plan, scale=0.3)
    torch.testing.assert_close(out, expected)


def test_layers_share_one_plan_and_a_new_plan_is_planned(flashinfer):
    runner, plan, (q, k, v) = PagedRunner("auto"), paged_plan(), inputs()
    for _ in range(18):
        runner(q, k, v, plan, scale=0.3)
    (planned,) = runner._planned.values()
    ((_, wrapper),) = planned.values()
    assert (FakePaged.made, wrapper.plans) == (1, 1)
    other = paged_plan()
    runner(q, k, v, other, scale=0.3)
    assert FakePaged.made == 2
    runner(q, k, v, plan, scale=0.5)
    assert FakePaged.made == 3


def test_wrappers_of_dead_plans_are_reused(flashinfer):
    runner, (q, k, v) = PagedRunner("auto"), inputs()
    for _ in range(5):
        plan = paged_plan()
        runner(q, k, v, plan, scale=0.3)
        del plan
        gc.collect()
    assert FakePaged.made == 1
    assert runner._planned == {}


def test_planning_under_capture_says_what_to_do(flashinfer, monkeypatch):
    runner, plan, (q, k, v) = PagedRunner("auto"), paged_plan(), inputs()
    runner(q, k, v, plan, scale=0.3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    runner(q, k, v, plan, scale=0.3)
    with pytest.raises(RuntimeError, match="plan this paged plan before CUDA-graph capture"):
        runner(q, k, v, paged_plan(), scale=0.3)


def test_ragged_agrees_with_the_reference_and_plans_once_per_shape(flashinfer, row):
    torch.manual_seed(0)
    runner = RaggedRunner("auto")
    for keys in (5, 7, 5):
        q = torch.randn(3, 2, 4, 8)
        k, v = torch.randn(3, keys, 2, 8), torch.randn(3, keys, 2, 8)
        out = runner(q, k, v, scale=0.3)
        torch.testing.assert_close(out, row("eager.attention")(q, k, v, scale=0.3))
    assert FakeRagged.made == 2


def test_runs_side_by_side_share_no_workspace(flashinfer):
    runner, q = RaggedRunner("auto"), torch.randn(1, 2, 4, 8)
    runs = [lambda: runner(q, q, q, scale=0.3)] * 2
    for _ in range(2):
        side_by_side(runs, q.device)
        assert FakeRagged.made == 2


def test_packed_requests_agree_with_the_reference(flashinfer, row):
    torch.manual_seed(0)
    q, k, v = torch.randn(6, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    facts = {"scale": 0.3, "lens": (1, 5), "kv_lens": (6, 3)}
    out = RaggedRunner("auto")(q, k, v, **facts)
    torch.testing.assert_close(out, row("eager.attention")(q, k, v, **facts))


def test_few_wrappers_are_kept_and_those_of_graphs_forever(flashinfer, monkeypatch):
    runner, capturing = RaggedRunner("auto", kept=2), [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])

    def run(rows):
        q = torch.randn(rows, 2, 8)
        runner(q, q, q, scale=1.0, lens=(rows,))

    run(1)
    capturing[0] = True
    run(1)
    capturing[0] = False
    for rows in (2, 3, 4, 1, 4):
        run(rows)
    assert FakeRagged.made == 4
    run(2)
    assert FakeRagged.made == 5


def rows_only(function):
    def checked(x, *args):
        assert x.ndim == 2
        return function(x, *args)

    return checked


def module_with(monkeypatch, name, **functions):
    parent = ModuleType("flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", parent)
    module = ModuleType(f"flashinfer.{name}")
    for attribute, function in functions.items():
        setattr(module, attribute, function)
    setattr(parent, name, module)
    monkeypatch.setitem(sys.modules, f"flashinfer.{name}", module)


def test_norm_calls(monkeypatch, row, strided):
    x, residual, weight = strided(2, 3, 8), strided(2, 3, 8, seed=1), strided(8, seed=2)
    before = x.clone(), residual.clone()
    references = {
        variant: row("torch.rmsnorm", **{"attrs.variant": variant}) for variant in ("rms", "gemma")
    }
    layernorm = row("torch.layernorm")
    module_with(
        monkeypatch,
        "norm",
        rmsnorm=rows_only(references["rms"]),
        gemma_rmsnorm=rows_only(references["gemma"]),
        layernorm=rows_only(layernorm),
    )
    for variant, reference in references.items():
        facts = {"attrs.variant": variant}
        out = row("flashinfer.rmsnorm", **facts)(x, weight, 1e-6)
        torch.testing.assert_close(out, reference(x, weight, 1e-6))
        fused = row("flashinfer.rmsnorm_add", **facts)(x, residual, weight, 1e-6)
        expected = row("torch.rmsnorm_add", **facts)(x, residual, weight, 1e-6)
        torch.testing.assert_close(fused, expected)
    for bias in (None, strided(8, seed=3)):
        out = row("flashinfer.layernorm")(x, weight, bias, 1e-6)
        torch.testing.assert_close(out, layernorm(x, weight, bias, 1e-6))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_activation_calls(monkeypatch, row, strided):
    names = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
    functions = {name: row(f"torch.activation.{name}") for name in names}
    module_with(monkeypatch, "activation", **functions)
    x = strided(2, 3, 10)
    for name, function in functions.items():
        torch.testing.assert_close(row(f"flashinfer.activation.{name}")(x), function(x))


def test_rope_calls(monkeypatch, row):
    reference = row("eager.rope")

    def library(positions, query, key, head_size, cache, *, is_neox):
        assert is_neox
        assert query.ndim == key.ndim == 2
        heads = (t.view(t.shape[0], -1, head_size) for t in (query, key))
        return tuple(t.flatten(1) for t in reference(positions, *heads, cache))

    module_with(monkeypatch, "rope", apply_rope_with_cos_sin_cache=library)
    fused = torch.randn(4, 40)
    q, k = fused[:, :24].view(4, 3, 8), fused[:, 24:32].view(4, 1, 8)
    cache = torch.randn(9, 8)
    positions = torch.tensor([0, 8, 3, 3])
    out = row("flashinfer.rope")(positions, q, k, cache)
    torch.testing.assert_close(out, reference(positions, q, k, cache))


def test_dense_gemm_calls(monkeypatch, row, strided):
    def mm_bf16(a, b):
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        return a @ b

    module_with(monkeypatch, "gemm")
    sys.modules["flashinfer"].mm_bf16 = mm_bf16
    layer = ModuleType("layer")
    layer.weight = torch.randn(5, 8)
    run = row("flashinfer.gemm.bf16")
    for bias in (None, torch.randn(5)):
        x = strided(2, 3, 8)
        expected = torch.nn.functional.linear(x, layer.weight, bias)
        torch.testing.assert_close(run(layer, x, bias), expected)
    assert run(layer, torch.zeros(0, 8), None).shape == (0, 5)


@pytest.mark.parametrize(
    "kernel_id",
    ["flashinfer.gemm.bf16", "flashinfer.attention.cudnn", "flashinfer.attention_paged.cudnn"],
)
def test_rows_on_cudnn_ask_for_its_frontend(kernel_id):
    assert "cudnn" in build_catalog().impl(kernel_id).libraries()


def test_block_fp8_gemm_scales_the_input_per_token_and_block(monkeypatch, row, strided):
    from types import SimpleNamespace

    def library(a, b, a_scale, b_scale, *, scale_major_mode, scale_granularity_mnk, out_dtype):
        assert scale_major_mode == "K"
        m, n, k = scale_granularity_mnk
        assert (m, a.dtype) == (1, torch.float8_e4m3fn)
        left = a.float() * a_scale.repeat_interleave(k, 1)
        right = b.float() * b_scale.repeat_interleave(n, 0).repeat_interleave(k, 1)
        return (left @ right.T).to(out_dtype)

    module_with(monkeypatch, "gemm", gemm_fp8_nt_groupwise=library)
    torch.manual_seed(0)
    scale = torch.rand(2, 3) + 0.5
    weight = torch.randn(8, 12).to(torch.float8_e4m3fn)
    spec = SimpleNamespace(physical_signature=SimpleNamespace(block_shape=(4, 4)))
    layer = SimpleNamespace(weight=weight, weight_scale=scale, spec=spec)
    x = strided(5, 12)
    x[1] = 0
    x[2] *= 1e4
    out = row("flashinfer.gemm.fp8_block")(layer, x, None)
    exact = x @ (weight.float() * scale.repeat_interleave(4, 0).repeat_interleave(4, 1)).T
    errors = (out - exact).norm(dim=1) / exact.norm(dim=1).clamp_min(1e-9)
    assert float(errors.max()) < 0.05
    assert torch.equal(out[1], torch.zeros(8))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "least"),
    [
        # partial results of 264 blocks of 64 rows; the library's usual 128 MiB are too little
        (8, 1, 256, 8 * 264 * 64 * 256 * 4),
        (8, 1, 128, 8 * 264 * 128 * 128 * 4),
        (32, 2, 128, 32 * 132 * 128 * 128 * 4),
        (16, 16, 64, 128 * 2**20),
    ],
)
def test_workspaces_hold_split_results(heads, kv_heads, head_dim, least):
    assert least <= workspace_bytes(heads, kv_heads, head_dim, 132) < 1.3 * least
    assert workspace_bytes(heads, kv_heads, head_dim, 0) == 128 * 2**20
