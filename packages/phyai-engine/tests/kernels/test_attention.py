import pytest
import torch

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
