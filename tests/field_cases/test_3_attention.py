"""Attention numerics and shapes."""

import pytest
import torch
from torch.nn import functional

from phyai.dispatch import NoKernelError, Selector
from phyai.runtime.paged import PagedPlan
from piper_kernels import piper_attention, sage_attention_2pp

from .attention_values import (
    CATALOG,
    attention_query,
    engine_attention,
    engine_row,
    error,
    exact,
    operands,
)

OPERATORS = {"piper": piper_attention, "sage": sage_attention_2pp}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = ["eager.attention", "sdpa.attention"]
both = pytest.mark.parametrize("name", OPERATORS)
on_devices = pytest.mark.parametrize("device", DEVICES)


@both
@on_devices
def test_case_52_one_query_over_few_keys(name, device):
    """One query over fewer keys than a tile holds is computed.

    Handled in piper_kernels.attention, phyai.kernels.attention.
    """
    for keys in (1, 5, 63, 127):
        given = operands(16, 16, 1, keys, device=device)
        assert error(OPERATORS[name](*given), exact(*given)) < 0.05
        for row in ROWS:
            assert error(engine_attention(row, *given), exact(*given)) < 1e-5


@both
def test_case_53_causal_operators_refuse_unequal_lengths(name):
    """A causal operator without a way to align its mask refuses unequal lengths.

    Handled in piper_kernels.attention.
    """
    with pytest.raises(ValueError, match="equal query and key lengths, got 4 and 8"):
        OPERATORS[name](*operands(2, 2, 4, 8), is_causal=True)


@pytest.mark.parametrize("row", ROWS)
def test_case_53_causal_rows_align_the_last_query_with_the_last_key(row):
    """The engine aligns the last query with the last key where keys are more.

    Handled in phyai.kernels.attention.
    """
    given = operands(2, 1, 4, 8)
    hidden = torch.ones(4, 8, dtype=torch.bool).triu(5)
    assert error(engine_attention(row, *given, causal=True), exact(*given, hidden)) < 1e-5


@both
def test_case_55_head_dimension_512_is_refused_by_the_operators(name):
    """Operators name the head dimensions they support, and PyTorch's attention stays its own.

    Handled in piper_kernels.attention.
    """
    with pytest.raises(ValueError, match="supports head dimensions 64 and 128, got 512"):
        OPERATORS[name](*operands(1, 1, 9, 9, 512))
    attention = functional.scaled_dot_product_attention
    assert attention is torch._C._nn.scaled_dot_product_attention


@pytest.mark.parametrize("device", ["cpu", "nvidia:sm90"])
def test_case_55_head_dimension_512_falls_back_in_the_engine(device, monkeypatch):
    """The engine runs a head of 512, as in a VAE, with a row that supports it.

    Handled in phyai.kernels.attention.
    """
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)
    query = attention_query(device, head_dim=512)
    chosen = Selector(CATALOG, device=device).explain(query).selected
    assert chosen == "sdpa.attention"
    given = operands(1, 1, 33, 33, 512)
    assert error(engine_attention(chosen, *given), exact(*given)) < 1e-5


@on_devices
def test_case_56_many_keys_are_as_accurate_as_few(device):
    """The error over 170,000 keys is that over a thousand.

    Handled in piper_kernels.attention.
    """
    errors = []
    for keys in (1000, 170_000):
        given = operands(1, 1, 3, keys, device=device, dtype=torch.bfloat16)
        # A few keys that match keep the result from averaging out.
        given[1][:, :, -3:] = 3 * given[0]
        errors.append(error(piper_attention(*given), exact(*given)))
    assert errors[0] < 0.05
    assert errors[1] < 0.05


@on_devices
def test_case_56_sums_over_many_equal_keys_lose_nothing(device):
    """A sum over 170,000 keys of equal weight keeps the keys that come last.

    Handled in piper_kernels.attention.
    """
    query, key, value = operands(1, 1, 3, 170_000, device=device, dtype=torch.bfloat16)
    key.zero_()
    value.zero_()
    value[:, :, -17_000:] = 1
    found = piper_attention(query, key, value)
    assert (found - 0.1).abs().max() < 0.01


@both
@on_devices
def test_case_58_huge_logits_select_one_key(name, device):
    """Queries and keys of 6e4 in FP16 give the value of the matching key, not NaN.

    Handled in piper_kernels.attention, phyai.kernels.attention.
    """
    query, key, value = operands(1, 1, 65, 65, device=device)
    query, key = torch.full_like(query, 6e4), torch.zeros_like(key)
    key[0, 0, 7] = 6e4
    expected = value[:, :, 7:8].expand_as(value).cpu().double()
    assert error(OPERATORS[name](query, key, value), expected) < 0.05
    for row in ROWS:
        assert error(engine_attention(row, query, key, value), expected) < 1e-5
        half = engine_attention(row, query, key, value, dtype=torch.float16)
        assert error(half, expected) < 1e-3


@both
@pytest.mark.parametrize("number", [30, 300, 2000, 20_000])
def test_case_58_logits_of_any_size_select_one_key(name, number):
    """Logits of 3e4 to 1e10 weigh the matching key by one, whatever FP32 resolves there.

    Handled in piper_kernels.attention.
    """
    query, key, value = operands(1, 1, 2, 2)
    query, key = torch.full_like(query, number), torch.zeros_like(key)
    key[0, 0, 1] = number
    expected = value[:, :, 1:].expand_as(value).double()
    assert error(OPERATORS[name](query, key, value, scale=1.0), expected) < 0.05


@pytest.mark.parametrize("mask", [{"mask_kind": "custom"}, {"masked": True}, {"sliding_window": 4}])
@pytest.mark.parametrize("causal", [True, False])
def test_case_61_no_mask_is_dropped_silently(mask, causal):
    """A mask beside or instead of the causal one is refused where no row can apply it.

    Handled in phyai.kernels.attention.
    """
    selector = Selector(CATALOG, device="cpu")
    assert selector.select(attention_query(causal=causal, masked=False)).kernel_id
    with pytest.raises(NoKernelError, match=f"attrs.{next(iter(mask))}"):
        selector.select(attention_query(causal=causal, **mask))


@pytest.mark.parametrize("row", ROWS)
def test_case_62_queries_that_see_no_key_give_zeros(row):
    """Queries before the first key, and requests without keys, give zeros.

    Handled in phyai.kernels.attention.
    """
    given = operands(2, 2, 5, 3)
    found = engine_attention(row, *given, causal=True)
    hidden = torch.ones(5, 3, dtype=torch.bool).triu(-1)
    expected = exact(*given, hidden)
    assert (found[:, :, :2] == 0).all()
    assert error(found[:, :, 2:], expected[:, :, 2:]) < 1e-5
    nothing = operands(2, 2, 5, 0)
    assert (engine_attention(row, *nothing) == 0).all()


def test_case_62_ragged_requests_without_keys_give_zeros():
    """A request without keys in a ragged batch gives zeros and leaves the others alone.

    Handled in phyai.kernels.attention.
    """
    q, k = torch.randn(3, 2, 8), torch.randn(2, 2, 8)
    run = engine_row("eager.attention")
    found = run(q, k, k, scale=0.3, lens=(1, 2), kv_lens=(0, 2))
    assert (found[0] == 0).all()
    assert torch.equal(found[1:], run(q[1:], k, k, scale=0.3, lens=(2,), kv_lens=(2,)))


@both
def test_case_62_operators_and_plans_refuse_empty_keys(name):
    """Operators refuse empty sequences, and a paged plan names the request without keys.

    Handled in piper_kernels.attention, phyai.runtime.paged.
    """
    query, key, value = operands(2, 2, 5, 0)
    with pytest.raises(ValueError, match="does not accept empty sequences, got 5 queries and 0"):
        OPERATORS[name](query, key, value)
    with pytest.raises(ValueError, match="request 1 has no keys"):
        PagedPlan.from_slots([1, 2], [torch.arange(3), torch.arange(0)], "cpu")


@on_devices
@pytest.mark.parametrize("keys", [256, 512])
def test_case_64_grouped_heads_over_256_keys_are_finite(device, keys):
    """One query of grouped heads over a multiple of 256 keys is finite and right.

    Handled in piper_kernels.attention, phyai.kernels.attention.
    """
    given = operands(4, 2, 1, keys, device=device)
    assert error(piper_attention(*given), exact(*given)) < 0.05
    for row in ROWS:
        assert error(engine_attention(row, *given), exact(*given)) < 1e-5
