"""piper-kernels' attention as rows: shapes of a generation tower, and who may choose them."""

import pytest
import torch

from phyai.dispatch import KernelQuery, PolicyError, Selector, load_policy
from phyai.dispatch.catalog import build_catalog
from phyai.kernels.attention_piper import heads_of_rows, rows_of_groups

SQNR = {"piper.attention": 20.0, "piper.attention.sage": 20.0}


def tensors(rows, keys, heads=4, kv_heads=2, batch=2):
    """Queries and longer keys, views of NaN-filled buffers whose heads are adjacent."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for length, count in ((rows, heads), (keys, kv_heads), (keys, kv_heads)):
        buffer = torch.full((batch, length + 3, count, 64), torch.nan, dtype=torch.bfloat16)
        values = torch.randn(batch, length, count, 64, generator=generator)
        buffer[:, 1 : length + 1] = values.bfloat16()
        found.append(buffer[:, 1 : length + 1])
    return found


def sqnr(found, expected):
    noise = (found.double() - expected.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


@pytest.mark.parametrize("kernel", SQNR)
@pytest.mark.parametrize(("rows", "keys"), [(67, 80), (1, 5)])
def test_rectangular_keys_and_grouped_heads(row, kernel, rows, keys):
    q, k, v = tensors(rows, keys)
    expected = row("eager.attention")(q, k, v, scale=0.125)
    found = row(kernel)(q, k, v, scale=0.125)
    assert found.shape == expected.shape
    assert found.dtype == q.dtype
    assert sqnr(found, expected) > SQNR[kernel]


@pytest.mark.parametrize("kernel", [*SQNR, "sdpa.attention"])
@pytest.mark.parametrize("batch", [1, 3])
def test_queries_stored_by_heads(row, kernel, batch):
    q, k, v = tensors(37, 45, heads=6, kv_heads=2, batch=batch)
    by_heads = q.transpose(1, 2).contiguous().transpose(1, 2)
    rows = rows_of_groups(by_heads, 2)
    assert rows.shape == (batch, 2, 3 * 37, 64)
    assert rows.data_ptr() == by_heads.data_ptr()
    assert rows_of_groups(q, 2) is rows_of_groups(by_heads, 6) is None
    assert torch.equal(heads_of_rows(rows, q), q)
    expected = row("eager.attention")(q, k, v, scale=0.125)
    found = row(kernel)(by_heads, k, v, scale=0.125)
    assert found.shape == q.shape
    assert sqnr(found, expected) > SQNR.get(kernel, 40)


@pytest.mark.parametrize("kernel", SQNR)
def test_causal(row, kernel):
    q, k, v = tensors(33, 33)
    expected = row("eager.attention")(q, k, v, scale=0.125, causal=True)
    found = row(kernel)(q, k, v, scale=0.125, causal=True)
    assert sqnr(found, expected) > SQNR[kernel]


def test_sage_reads_each_heads_own_keys(row):
    q, k, v = tensors(9, 12, heads=6, kv_heads=2, batch=1)
    v = torch.arange(2.0).view(1, 1, 2, 1).expand(1, 12, 2, 64).bfloat16() + 1
    found = row("piper.attention.sage")(q, k, v, scale=0.125)
    expected = torch.tensor([1.0, 1, 1, 2, 2, 2]).view(1, 1, 6, 1).expand(found.shape)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=0)


def test_sparse_keeps_text_keys_and_all_blocks_when_asked(row):
    q, k, v = tensors(130, 141)
    facts = {"shape.heads": 4}
    dense = row("eager.attention")(q, k, v, scale=0.125)
    every = row("piper.attention.sparse", {"keep_ratio": 1.0}, **facts)(q, k, v, scale=0.125)
    assert every.shape == dense.shape
    assert sqnr(every, dense) > 20
    # Only a text key that no query has matches: all weight goes to it, however little is kept.
    k = k.clone()
    k[:, 5] = 40 * q.float().mean((1, 2))[:, None].sign().bfloat16()
    q = k[:, 5:6, :1].expand(2, 130, 4, 64)
    for params in ({"keep_ratio": 0.3}, {"keep_ratio": 0.3, "routing": "mean"}):
        few = row("piper.attention.sparse", params, **facts)(q, k, v, scale=0.125)
        expected = row("eager.attention")(q, k, v, scale=0.125)
        assert sqnr(few, expected) > 20


def query(tokens=3093, **changes):
    keys = tokens + 82
    given = {"heads": 32, "kv_heads": 8, "head_dim": 128, "tokens": tokens, "kv_tokens": keys}
    return KernelQuery.build(
        "attention",
        role="generation",
        device="nvidia:sm90",
        dtype=dict.fromkeys(("input", "key", "value"), "bf16"),
        dims=given,
        attrs={"layout": "padded", "causal": False, **changes},
    )


@pytest.fixture
def policy(tmp_path, monkeypatch):
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)
    catalog = build_catalog()

    def make(kernel, params=""):
        path = tmp_path / "policy.yaml"
        path.write_text(
            "schema: phyai.kernel/v1\nprofile: static\nrules:\n"
            f"  - match: {{op: attention}}\n    restrict_to: {kernel}\n{params}"
        )
        return Selector(catalog, load_policy(path, catalog=catalog), device="nvidia:sm90")

    return make


@pytest.mark.parametrize("name", ["", ".sage", ".sparse"])
def test_only_a_rule_chooses_them(policy, name):
    kernel = f"piper.attention{name}"
    assert policy(kernel).explain(query()).selected == kernel
    plain = Selector(build_catalog(), device="nvidia:sm90")
    trace = plain.explain(query(), prefer=(kernel,))
    assert trace.selected == "flashinfer.attention"
    record = next(entry for entry in trace.candidates if entry.kernel_id == kernel)
    assert record.excluded == "changes results; a policy rule must name it"


def test_sparse_needs_blocks_and_no_mask(policy):
    chooser = policy("piper.attention.sparse")
    for refused in (query(tokens=63), query(causal=True)):
        trace = chooser.explain(refused)
        assert trace.selected != "piper.attention.sparse"


@pytest.mark.parametrize(
    ("params", "message"),
    [("keep_ratio: 0", "keep_ratio is 0"), ("routing: best", "routing is 'best'")],
)
def test_bad_params_are_named(policy, params, message):
    with pytest.raises(PolicyError, match=message):
        policy("piper.attention.sparse", f"    params: {{{params}}}\n")
