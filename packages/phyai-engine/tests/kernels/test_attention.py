import pytest
import torch

from phyai.dispatch import KernelQuery, Selector
from phyai.dispatch.catalog import build_catalog

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
ROWS = ["eager.attention", "sdpa.attention"]


def attention64(q, k, v, scale, mask=None):
    """q [S, H, D], k and v [S2, Hk, D]; one head and one query at a time."""
    rows, heads, _ = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(rows, heads, v.shape[-1], dtype=torch.double)
    for head in range(heads):
        keys, values = k[:, head // group].double(), v[:, head // group].double()
        for i in range(rows):
            visible = slice(None) if mask is None else mask[i]
            logits = keys[visible] @ q[i, head].double() * scale
            weights = torch.exp(logits - logits.max())
            out[i, head] = (weights / weights.sum()) @ values[visible]
    return out


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel", ROWS)
@pytest.mark.parametrize(
    ("rows", "keys", "heads", "kv_heads", "dim"),
    [(1, 1, 1, 1, 1), (5, 7, 6, 2, 9), (3, 3, 4, 1, 72)],
)
def test_padded_attention(
    row, strided, relative_error, kernel, dtype, rows, keys, heads, kv_heads, dim
):
    q = strided(2, rows, heads, dim, dtype=dtype)
    k = strided(2, keys, kv_heads, dim, dtype=dtype, seed=1)
    v = strided(2, keys, kv_heads, dim, dtype=dtype, seed=2)
    out = row(kernel)(q, k, v, scale=0.37)
    expected = torch.stack([attention64(q[b], k[b], v[b], 0.37) for b in range(2)])
    assert out.dtype == dtype
    assert out.shape == q.shape
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("kernel", ROWS)
@pytest.mark.parametrize(("rows", "keys"), [(5, 5), (3, 7)])
def test_causal_aligns_the_last_query_with_the_last_key(
    row, strided, relative_error, kernel, rows, keys
):
    q = strided(1, rows, 2, 8)
    k, v = strided(1, keys, 1, 8, seed=1), strided(1, keys, 1, 8, seed=2)
    mask = [list(range(keys - rows + i + 1)) for i in range(rows)]
    out = row(kernel)(q, k, v, scale=0.5, causal=True)
    assert relative_error(out[0], attention64(q[0], k[0], v[0], 0.5, mask)) < 2e-6


@pytest.mark.parametrize("kernel", ROWS)
def test_queries_before_the_first_key_get_zeros(row, strided, relative_error, kernel):
    q = strided(2, 5, 4, 8).requires_grad_()
    k, v = strided(2, 3, 2, 8, seed=1), strided(2, 3, 2, 8, seed=2)
    out = row(kernel)(q, k, v, scale=0.5, causal=True)
    assert (out[:, :2] == 0).all()
    mask = [[], [], [0], [0, 1], [0, 1, 2]]
    for batch in range(2):
        expected = attention64(q[batch, 2:], k[batch], v[batch], 0.5, mask[2:])
        assert relative_error(out[batch, 2:].detach(), expected) < 2e-6
    out.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("kernel", ROWS)
def test_huge_logits_do_not_overflow(row, kernel):
    q = torch.full((1, 2, 1, 4), 200.0)
    k = torch.cat([torch.full((1, 1, 1, 4), 200.0), torch.zeros(1, 1, 1, 4)], dim=1)
    v = torch.tensor([1.0, 5.0]).view(1, 2, 1, 1).expand(1, 2, 1, 4)
    out = row(kernel)(q, k, v, scale=1.0)
    torch.testing.assert_close(out, torch.ones(1, 2, 1, 4))


@pytest.mark.parametrize("kernel", ROWS)
def test_gradients_reach_all_inputs(row, kernel):
    tensors = [torch.randn(1, 3, heads, 4, requires_grad=True) for heads in (4, 2, 2)]
    row(kernel)(*tensors, scale=0.5).square().sum().backward()
    assert all(float(tensor.grad.abs().sum()) > 0 for tensor in tensors)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lens", "kv_lens"), [((3, 1, 5), (3, 4, 9)), ((2, 4), None), ((1,), (1,))]
)
def test_ragged_attention(row, strided, relative_error, lens, kv_lens, causal):
    keys = kv_lens or lens
    q = strided(sum(lens), 4, 8)
    k, v = strided(sum(keys), 2, 8, seed=1), strided(sum(keys), 2, 8, seed=2)
    options = {} if kv_lens is None else {"kv_lens": kv_lens}
    out = row("eager.attention")(q, k, v, scale=0.4, causal=causal, lens=lens, **options)
    assert out.shape == q.shape
    parts = zip(*(x.split([*n]) for x, n in ((q, lens), (k, keys), (v, keys))), strict=True)
    expected = []
    for queries, request_keys, values in parts:
        first = len(request_keys) - len(queries)
        mask = [list(range(first + i + 1)) for i in range(len(queries))] if causal else None
        expected.append(attention64(queries, request_keys, values, 0.4, mask))
    assert relative_error(out, torch.cat(expected)) < 2e-6


@pytest.mark.parametrize(
    ("layout", "head_dim", "device", "chosen"),
    [
        ("ragged", 128, "nvidia:sm90", "flashinfer.attention"),
        ("ragged", 96, "nvidia:sm90", "eager.attention"),
        ("ragged", 64, "cpu", "eager.attention"),
        ("padded", 72, "nvidia:sm90", "sdpa.attention"),
        ("padded", 64, "cpu", "sdpa.attention"),
    ],
)
def test_which_row_serves_a_layout(monkeypatch, layout, head_dim, device, chosen):
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)
    query = KernelQuery.build(
        "attention",
        device=device,
        dtype=dict.fromkeys(("input", "key", "value"), "bf16"),
        dims={"heads": 4, "kv_heads": 4, "head_dim": head_dim, "tokens": 8},
        attrs={"layout": layout, "causal": False},
    )
    assert Selector(build_catalog(), device=device).explain(query).selected == chosen


@pytest.mark.parametrize("backend", ["auto", "cudnn", "flash", "efficient"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_preferred_backend_changes_no_number(row, backend, causal):
    """On a CPU the others follow, which proves that a preference is no demand."""
    q, k, v = (torch.randn(1, 5, heads, 8) for heads in (4, 2, 2))
    found = row("sdpa.attention", {"sdpa_backend": backend})(q, k, v, scale=0.4, causal=causal)
    expected = row("eager.attention")(q, k, v, scale=0.4, causal=causal)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_preferred_backend_is_asked_first(monkeypatch, row):
    from torch.nn import attention

    asked = []

    class Recorded:
        def __init__(self, order, *, set_priority):
            asked.append((order[0], len(order), set_priority))

        def __enter__(self):
            return None

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(attention, "sdpa_kernel", Recorded)
    q = torch.randn(1, 3, 2, 8)
    row("sdpa.attention", {"sdpa_backend": "cudnn"})(q, q, q, scale=1.0)
    assert asked == [(attention.SDPBackend.CUDNN_ATTENTION, 4, True)]
    check = build_catalog().impl("sdpa.attention").check_params
    with pytest.raises(ValueError, match="sdpa_backend is 'fa4'; allowed: auto, cudnn"):
        check({"sdpa_backend": "fa4"})
