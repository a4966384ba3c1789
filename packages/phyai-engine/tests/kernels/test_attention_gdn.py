"""The gated delta rule: against its definition in matrix form, and how rows call libraries."""

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from phyai.dispatch import KernelQuery, Selector
from phyai.dispatch.catalog import build_catalog

LENS = (5, 1, 7)
DIM = 8


def inputs(heads=2, key_heads=2, value_heads=4, *, dtype=torch.float32, seed=0, lens=LENS, dim=DIM):
    generator = torch.Generator().manual_seed(seed)
    tokens, states = sum(lens), max(heads, value_heads)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    q, k, v = (draw(tokens, count, dim).to(dtype) for count in (heads, key_heads, value_heads))
    a, b = draw(tokens, states).to(dtype), draw(tokens, states).to(dtype)
    offsets = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    return q, k, v, a, b, draw(states), draw(states), offsets


def defined(q, k, v, a, b, a_log, dt_bias, offsets, *, scale, state=None, normed=False):
    """S_t = exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ in fp64, head by head.

    Written as products of whole matrices, unlike the row, which updates by the prediction error.
    """
    states = a.shape[1]
    q, k, v, a, b, a_log, dt_bias = (x.double() for x in (q, k, v, a, b, a_log, dt_bias))
    if normed:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    out, finals = torch.zeros(v.shape[0], states, v.shape[2]).double(), []
    for request, (start, stop) in enumerate(pairwise(offsets)):
        final = []
        for head in range(states):
            s = torch.zeros(v.shape[2], v.shape[2]).double()
            if state is not None:
                s = state[request, head].double()
            for t in range(start, stop):
                query, key, value = (x[t, head * x.shape[1] // states] for x in (q, k, v))
                decay = (-a_log[head].exp() * (1 + (a[t, head] + dt_bias[head]).exp()).log()).exp()
                beta = 1 / (1 + (-b[t, head]).exp())
                erase = torch.eye(len(key)).double() - beta * torch.outer(key, key)
                s = erase @ s * decay + beta * torch.outer(key, value)
                out[t, head] = scale * s.T @ query
            final.append(s)
        finals.append(torch.stack(final))
    return out, torch.stack(finals)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("counts", [(2, 2, 4), (4, 2, 2), (3, 3, 3)])
def test_the_reference_is_the_definition(row, counts, normed):
    args = inputs(*counts)
    if not normed:
        # the rule only contracts for keys of length at most one
        args = (args[0], args[1] / args[1].norm(dim=-1, keepdim=True), *args[2:])
    run = row("eager.attention_gdn", **{"attrs.use_qk_l2norm": normed})
    out, state = run(*args, scale=0.4)
    expected, final = defined(*args, scale=0.4, normed=normed)
    assert state.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), final, rtol=1e-5, atol=1e-5)


def test_a_state_continues_a_request(row):
    run = row("eager.attention_gdn", **{"attrs.use_qk_l2norm": True})
    q, k, v, a, b, a_log, dt_bias, _ = inputs(lens=(9,))
    whole, final = run(q, k, v, a, b, a_log, dt_bias, torch.tensor([0, 9]), scale=1.0)
    state, parts = None, []
    for rows in (slice(0, 4), slice(4, 9)):
        here = [x[rows] for x in (q, k, v, a, b)]
        offsets = torch.tensor([0, rows.stop - rows.start])
        before = None if state is None else state.clone()
        out, after = run(*here, a_log, dt_bias, offsets, scale=1.0, state=state)
        assert state is None or torch.equal(state, before)
        state = after
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts), whole)
    torch.testing.assert_close(state, final)


def test_requests_do_not_see_each_other(row):
    run = row("eager.attention_gdn")
    args = inputs()
    changed = tuple(x.clone() for x in args)
    for x in changed[:5]:
        x[: LENS[0]] = 3.0
    before, after = run(*args, scale=1.0), run(*changed, scale=1.0)
    assert torch.equal(before[0][LENS[0] :], after[0][LENS[0] :])
    assert torch.equal(before[1][1:], after[1][1:])
    assert not torch.equal(before[1][0], after[1][0])


def test_a_request_without_tokens_keeps_its_state(row):
    q, k, v, a, b, a_log, dt_bias, _ = inputs(lens=(3,))
    offsets = torch.tensor([0, 0, 3, 3])
    state = torch.randn(3, 4, DIM, DIM)
    run = row("eager.attention_gdn")
    _, final = run(q, k, v, a, b, a_log, dt_bias, offsets, scale=1.0, state=state)
    assert torch.equal(final[0], state[0])
    assert torch.equal(final[2], state[2])
    assert not torch.equal(final[1], state[1])


def test_results_have_the_dtype_of_the_values(row):
    out, state = row("eager.attention_gdn")(*inputs(dtype=torch.bfloat16), scale=1.0)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)


def fake_chunked(seen, reference):
    def chunk_gated_delta_rule(q, k, v, g, beta, **options):
        seen.update(options, heads=(q.shape[2], v.shape[2]))
        assert [x.shape[0] for x in (q, k, v, g, beta)] == [1] * 5
        assert g.dtype == beta.dtype == torch.float32
        assert options["cu_seqlens"].dtype == torch.int64
        return reference[0][None], reference[1]

    return chunk_gated_delta_rule


@pytest.mark.parametrize("name", ["flash_qla", "fla"])
def test_how_chunked_libraries_are_called(row, monkeypatch, name):
    args = inputs()
    expected = row("eager.attention_gdn")(*args, scale=0.5)
    seen = {}
    path = {"flash_qla": "flash_qla", "fla": "fla.ops.gated_delta_rule"}[name]
    module = ModuleType(path)
    module.chunk_gated_delta_rule = fake_chunked(seen, expected)
    for parent in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, path, module)
    out, state = row(f"{name}.attention_gdn", **{"attrs.use_qk_l2norm": True})(*args, scale=0.5)
    assert torch.equal(out, expected[0])
    assert torch.equal(state, expected[1])
    assert seen["use_qk_l2norm_in_kernel"] is True
    assert (seen["scale"], seen["output_final_state"], seen["heads"]) == (0.5, True, (2, 4))


def fake_flashinfer(monkeypatch):
    library, module = ModuleType("flashinfer"), ModuleType("flashinfer.gdn_prefill")
    library.gdn_prefill = module
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setitem(sys.modules, "flashinfer.gdn_prefill", module)
    return module


@pytest.mark.parametrize(("arch", "usable"), [("sm90", False), ("sm100", True)])
def test_a_missing_kernel_is_found_before_the_call(row, monkeypatch, arch, usable):
    module = fake_flashinfer(monkeypatch)
    module.chunk_gated_delta_rule = module.chunk_gated_delta_rule_sm100 = print
    module.chunk_gated_delta_rule_sm90 = None
    if usable:
        assert row("flashinfer.attention_gdn", **{"device.arch": arch})
    else:
        with pytest.raises(ImportError, match="for sm90 is unavailable; install nvidia-cutlass"):
            row("flashinfer.attention_gdn", **{"device.arch": arch})


def test_how_flashinfer_is_called(row, monkeypatch):
    """The stand-in computes with the library's conventions: decay itself, values first."""

    def chunk_gated_delta_rule(q, k, v, **options):
        assert all(x.is_contiguous() for x in (q, k, v, options["initial_state"]))
        assert options["output_state"].shape == options["initial_state"].shape
        s = options["initial_state"].double().clone()
        out, offsets = torch.zeros_like(v), options["cu_seqlens"].tolist()
        for request, (start, stop) in enumerate(pairwise(offsets)):
            for t in range(start, stop):
                for head in range(v.shape[1]):
                    key, query = (x[t, head * x.shape[1] // v.shape[1]].double() for x in (k, q))
                    old = s[request, head] * options["g"][t, head].double()
                    error = v[t, head].double() - old @ key
                    s[request, head] = old + options["beta"][t, head] * torch.outer(error, key)
                    out[t, head] = options["scale"] * (s[request, head] @ query)
        return out, s.float()

    fake_flashinfer(monkeypatch).chunk_gated_delta_rule = chunk_gated_delta_rule
    args, state = inputs(), torch.randn(3, 4, DIM, DIM)
    facts = {"attrs.use_qk_l2norm": True}
    actual = row("flashinfer.attention_gdn", **facts)(*args, scale=0.5, state=state)
    expected = row("eager.attention_gdn", **facts)(*args, scale=0.5, state=state)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


FACTS = {
    "dtype": {
        **dict.fromkeys(("input", "key", "value", "a", "b", "dt_bias"), "bf16"),
        "a_log": "fp32",
    },
    "dims": {"heads": 4, "key_heads": 4, "value_heads": 8, "state_heads": 8, "head_dim": 128},
    "attrs": {"layout": "ragged"},
}


@pytest.mark.parametrize(
    ("device", "mode", "changes", "chosen"),
    [
        ("nvidia:sm90", "eager", {}, "flash_qla"),
        ("nvidia:sm90", "capture", {}, "fla"),
        ("nvidia:sm120", "eager", {}, "flash_qla"),
        ("nvidia:sm90", "eager", {"dims": {"head_dim": 64}}, "fla"),
        ("nvidia:sm80", "eager", {}, "fla"),
        ("nvidia:sm90", "eager", {"dtype": {"a_log": "bf16"}}, "fla"),
        ("nvidia:sm90", "eager", {"dtype": {"input": "fp32"}}, "eager"),
        # queries in groups
        (
            "nvidia:sm90",
            "eager",
            {"dims": {"heads": 8, "value_heads": 4}},
            "flashinfer",
        ),
        ("cpu", "eager", {}, "eager"),
        ("cpu", "capture", {}, "eager"),
    ],
)
def test_which_row_is_chosen(monkeypatch, device, mode, changes, chosen):
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)
    facts = {key: {**FACTS[key], **changes.get(key, {})} for key in FACTS}
    query = KernelQuery.build("attention_gdn", device=device, mode=mode, **facts)
    trace = Selector(build_catalog(), device=device).explain(query)
    assert trace.selected == f"{chosen}.attention_gdn"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flashinfer", "fla", "flash_qla"])
@pytest.mark.parametrize("counts", [(2, 2, 4), (4, 2, 2)])
def test_rows_on_the_gpu(row, relative_error, name, counts):
    args = inputs(*counts, dtype=torch.bfloat16, lens=(70, 1, 130), dim=128)
    args = tuple(x.cuda() for x in args)
    heads, key_heads, value_heads = counts
    dims = {"heads": heads, "key_heads": key_heads, "value_heads": value_heads}
    dims |= {"state_heads": max(heads, value_heads), "head_dim": 128, "tokens": 201}
    dtypes = {**FACTS["dtype"], "dt_bias": "fp32"}
    attrs = {"layout": "ragged", "use_qk_l2norm": True}
    query = KernelQuery.build("attention_gdn", device="cuda", dtype=dtypes, dims=dims, attrs=attrs)
    trace = Selector(build_catalog(), device="cuda").explain(query)
    verdict = next(each for each in trace.candidates if each.kernel_id.startswith(f"{name}."))
    if not verdict.eligible:
        pytest.skip(verdict.reason)
    facts = {"attrs.use_qk_l2norm": True}
    major, minor = torch.cuda.get_device_capability()
    facts["device.arch"] = f"sm{major}{minor}"
    try:
        run = row(f"{name}.attention_gdn", **facts)
    except ImportError as missing:
        pytest.skip(str(missing))
    state = 0.1 * torch.randn(3, max(heads, value_heads), 128, 128, device="cuda")
    actual = run(*args, scale=128**-0.5, state=state)
    expected = row("eager.attention_gdn", **facts)(*args, scale=128**-0.5, state=state)
    for one, other in zip(actual, expected, strict=True):
        assert relative_error(one, other) < 2e-2
