import timeit

import pytest
import torch

from phyai.runtime.paged import PagedPlan

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def attention64(q, k, v, scale):
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.double)
    for head in range(heads):
        keys, values = k[:, head // group].double(), v[:, head // group].double()
        logits = q[:, head].double() @ keys.T * scale
        weights = torch.exp(logits - logits.amax(-1, keepdim=True))
        out[:, head] = (weights / weights.sum(-1, keepdim=True)) @ values
    return out


def plan_of(qo_lens, page_lists, kv_lens, page_size):
    def index(values):
        return torch.tensor(values, dtype=torch.int32)

    def starts(lengths):
        return index([sum(lengths[:i]) for i in range(len(lengths) + 1)])

    pages = [len(pages) for pages in page_lists]
    last = [n - (p - 1) * page_size for n, p in zip(kv_lens, pages, strict=True)]
    return PagedPlan(
        qo_indptr=starts(qo_lens),
        kv_indptr=starts(pages),
        kv_indices=index([page for pages in page_lists for page in pages]),
        kv_last_page_len=index(last),
        qo_lens=tuple(qo_lens),
        kv_lens=tuple(kv_lens),
        page_size=page_size,
    )


def nan_pages(pages, page_size, kv_heads, dim, dtype):
    return torch.full((pages, page_size, kv_heads, dim), torch.nan, dtype=dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (8, 1)])
def test_requests_see_their_pages_only(
    row, strided, relative_error, dtype, page_size, heads, kv_heads
):
    """Every slot that no plan lists holds NaN, also the tail of each last page."""
    dim, qo_lens, kv_lens = 9, (1, 5, 3), (7, 1, 4)
    generator = torch.Generator().manual_seed(0)
    pages = torch.randperm(20, generator=generator).tolist()
    k_pages = nan_pages(20, page_size, kv_heads, dim, dtype)
    v_pages = nan_pages(20, page_size, kv_heads, dim, dtype)
    q = strided(sum(qo_lens), heads, dim, dtype=dtype)
    lists, expected, start = [], [], 0
    for request, (rows, keys) in enumerate(zip(qo_lens, kv_lens, strict=True)):
        mine = [pages.pop() for _ in range(-(-keys // page_size))]
        k = strided(keys, kv_heads, dim, dtype=dtype, seed=2 * request + 1)
        v = strided(keys, kv_heads, dim, dtype=dtype, seed=2 * request + 2)
        for i in range(keys):
            k_pages[mine[i // page_size], i % page_size] = k[i]
            v_pages[mine[i // page_size], i % page_size] = v[i]
        expected.append(attention64(q[start : start + rows], k, v, 0.4))
        lists.append(mine)
        start += rows
    plan = plan_of(qo_lens, lists, kv_lens, page_size)
    out = row("eager.attention_paged")(q, k_pages, v_pages, plan, scale=0.4)
    assert out.dtype == dtype
    assert out.shape == q.shape
    assert relative_error(out, torch.cat(expected)) < TOLERANCE[dtype]


def test_shared_and_repeated_pages(row, relative_error):
    """Two requests may list the same page, and one request the same page twice."""
    torch.manual_seed(0)
    k, v, q = torch.randn(3, 1, 1, 4), torch.randn(3, 1, 1, 4), torch.randn(2, 2, 4)
    plan = plan_of((1, 1), ([0, 2], [2, 2, 1]), (2, 3), 1)
    out = row("eager.attention_paged")(q, k, v, plan, scale=0.5)
    first = attention64(q[:1], k[[0, 2], 0], v[[0, 2], 0], 0.5)
    second = attention64(q[1:], k[[2, 2, 1], 0], v[[2, 2, 1], 0], 0.5)
    assert relative_error(out, torch.cat([first, second])) < 2e-6


def test_gradients_reach_pages_and_query(row):
    q = torch.randn(2, 2, 4, requires_grad=True)
    k, v = (torch.randn(5, 1, 1, 4, requires_grad=True) for _ in range(2))
    plan = plan_of((2,), ([3, 0],), (2,), 1)
    row("eager.attention_paged")(q, k, v, plan, scale=0.5).square().sum().backward()
    for pages in (k, v):
        used = pages.grad.abs().sum((1, 2, 3)) > 0
        assert used.tolist() == [True, False, False, True, False]
    assert float(q.grad.abs().sum()) > 0


def test_no_requests(row):
    plan = plan_of((), (), (), 1)
    out = row("eager.attention_paged")(
        torch.zeros(0, 2, 4), *[torch.zeros(1, 1, 1, 4)] * 2, plan, scale=1.0
    )
    assert out.shape == (0, 2, 4)


@pytest.mark.slow
def test_speed_at_the_size_of_an_action_chunk(row):
    """50 rows, 200 keys, 8 heads of 256: 2 ms on one idle core; the bound is for a busy host."""
    q, k, v = torch.randn(50, 8, 256), torch.randn(200, 1, 1, 256), torch.randn(200, 1, 1, 256)
    plan, run = plan_of((50,), (list(range(200)),), (200,), 1), row("eager.attention_paged")
    call = lambda: run(q, k, v, plan, scale=1 / 16)  # noqa: E731
    assert min(timeit.repeat(call, number=5, repeat=9)) / 5 < 0.05
