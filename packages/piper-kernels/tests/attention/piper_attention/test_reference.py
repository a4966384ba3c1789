"""The maths of dense Piper attention against FP64 attention and loops over single numbers."""

import pytest
import torch
from attention_oracle import exact_attention, piper_loop, random_operands, sqnr

from piper_kernels import piper_attention
from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.piper_attention import reference

LENGTHS = [1, 2, 9, 63, 64, 65, 127, 129, 193]
causal = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
widths = pytest.mark.parametrize("head_dim", [64, 128], ids=["D64", "D128"])
# Of the output, for N(0, 1).
MEAN_ERROR, MAX_ERROR = 0.01, 0.2
# Codes may flip at ties between FP32 and FP64.
LOOP_MEAN, LOOP_MAX = 1e-4, 0.01


@causal
@widths
@pytest.mark.parametrize("rows", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_close_to_exact_attention(rows, dtype, head_dim, is_causal, nan_filled_memory):
    operands = random_operands(1, 2, 2, rows, rows, head_dim, dtype, seed=rows)
    output = piper_attention(*operands, is_causal=is_causal)
    assert output.shape == operands[0].shape
    assert output.dtype == dtype
    assert output.is_contiguous()
    error = (output.double() - exact_attention(*operands, is_causal=is_causal)).abs()
    assert error.mean() < MEAN_ERROR
    assert error.max() < MAX_ERROR


@causal
@pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.name)
@pytest.mark.parametrize(("rows", "head_dim"), [(1, 64), (9, 128), (65, 64), (130, 128)])
def test_equal_to_a_loop_over_single_numbers(rows, head_dim, granularity, is_causal):
    operands = random_operands(1, 1, 1, rows, rows, head_dim, seed=rows)
    output = reference.attend(
        reference.prepare(*operands, is_causal=is_causal, granularity=granularity),
        scale=head_dim**-0.5,
        is_causal=is_causal,
    )[0, 0]
    heads = [x[0, 0] for x in operands]
    wanted = piper_loop(*heads, is_causal=is_causal, granularity=granularity.name)
    error = (output.double() - wanted).abs()
    assert error.mean() < LOOP_MEAN
    assert error.max() < LOOP_MAX


@pytest.mark.parametrize(("queries", "keys"), [(1, 127), (9, 65), (193, 1), (65, 193), (128, 64)])
def test_rectangular(queries, keys, nan_filled_memory):
    operands = random_operands(2, 4, 2, queries, keys, 64, seed=keys)
    output = piper_attention(*operands)
    assert sqnr(output, exact_attention(*operands)) > 33
    last = piper_loop(operands[0][1, 3], operands[1][1, 1], operands[2][1, 1], is_causal=False)
    torch.testing.assert_close(output[1, 3].double(), last, atol=LOOP_MAX, rtol=0)


@pytest.mark.parametrize(("queries", "keys"), [(1, 256), (2, 1001), (4, 8193), (3, 131073)])
def test_many_keys(queries, keys):
    operands = random_operands(1, 2, 1, queries, keys, 64, seed=keys)
    output = reference.attend(reference.prepare(*operands), scale=0.125)
    assert sqnr(output, exact_attention(*operands)) > 33


@causal
def test_four_thousand_tokens(is_causal):
    operands = random_operands(1, 1, 1, 4096, 4096, 128)
    output = piper_attention(*operands, is_causal=is_causal)
    assert sqnr(output, exact_attention(*operands, is_causal=is_causal)) >= 34


@causal
@widths
@pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.name)
def test_quality(head_dim, is_causal, granularity):
    operands = random_operands(1, 2, 2, 1024, 1024, head_dim)
    scale = head_dim**-0.5
    output = reference.attention(*operands, scale, is_causal, granularity=granularity)
    exact = exact_attention(*operands, is_causal=is_causal)
    assert sqnr(output, exact) >= 34
    cosine = torch.nn.functional.cosine_similarity(output.double().flatten(), exact.flatten(), 0)
    assert cosine > 0.9998


def test_a_value_bias_costs_no_quality():
    query, key, value = random_operands(1, 1, 1, 512, 512, 128, torch.bfloat16)
    value = value + torch.where(torch.arange(128) % 2 == 0, 8.0, -8.0).bfloat16()
    error = piper_attention(query, key, value).double() - exact_attention(query, key, value)
    assert error.pow(2).mean() < 1e-3
    plain = reference.prepare(query, key, value, is_causal=True)
    assert plain.value_mean is None
    centered = reference.prepare(query, key, value)
    assert plain.value_scale.mean() > 3 * centered.value_scale.mean()


def test_outlier_features_of_keys_cost_little():
    query, key, value = random_operands(1, 1, 1, 512, 512, 64)
    key[..., 5] += 40
    key[..., 17] *= 10
    assert sqnr(piper_attention(query, key, value), exact_attention(query, key, value)) > 25


@pytest.mark.parametrize("rows", [1, 65, 193])
def test_constant_values_are_exact(rows):
    query, key, value = random_operands(1, 2, 2, rows, rows, 64)
    value = value[:, :, :1].expand(-1, -1, rows, -1)
    output = piper_attention(query, key, value)
    assert torch.equal(output, value)


@widths
def test_causal_rows_do_not_depend_on_later_values(head_dim):
    query, key, value = random_operands(1, 4, 2, 193, 193, head_dim)
    first = piper_attention(query, key, value, is_causal=True)
    for cut in (1, 32, 64, 100, 192):
        changed = value.clone()
        changed[:, :, cut:] = 32 * changed[:, :, cut:].flip(-1)
        second = piper_attention(query, key, changed, is_causal=True)
        assert torch.equal(first[:, :, :cut], second[:, :, :cut])
        assert not torch.equal(first[:, :, cut:], second[:, :, cut:])


@causal
@pytest.mark.parametrize("groups", [1, 2, 3, 7, 8, 16])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_equal_repeated_keys_and_values(groups, kv_heads, is_causal):
    keys = 65 if is_causal else 131
    operands = random_operands(2, groups * kv_heads, kv_heads, 65, keys, 64, seed=groups)
    repeated = (x.repeat_interleave(groups, 1) for x in operands[1:])
    assert torch.equal(
        piper_attention(*operands, is_causal=is_causal),
        piper_attention(operands[0], *repeated, is_causal=is_causal),
    )


@causal
def test_windows_of_queries_do_not_change_results(is_causal, monkeypatch):
    operands = random_operands(1, 3, 1, 321, 321, 64)
    whole = piper_attention(*operands, is_causal=is_causal)
    monkeypatch.setattr(
        reference, "query_windows", lambda *_: [slice(0, 64), slice(64, 192), slice(192, 321)]
    )
    assert torch.equal(piper_attention(*operands, is_causal=is_causal), whole)


@causal
@pytest.mark.parametrize("amplitude", [1e-6, 1e-3, 1.0, 1e3, 6e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_amplitudes_of_values(amplitude, dtype, is_causal):
    query, key, value = random_operands(1, 2, 1, 129, 129, 64)
    value = (value * amplitude).clamp(-65504, 65504).to(dtype)
    query, key = query.to(dtype), key.to(dtype)
    operands = reference.prepare(query, key, value, is_causal=is_causal)
    output = reference.attend(operands, scale=0.125, is_causal=is_causal)
    assert output.isfinite().all()
    # The epsilon of the scales is a third of the values at 1e-6, and FP16 has steps of 6e-8.
    assert sqnr(output, exact_attention(query, key, value, is_causal=is_causal)) > (
        24 if amplitude == 1e-6 else 33
    )


@pytest.mark.parametrize("amplitude", [1e-6, 1e-3, 1e3, 6e4])
@causal
def test_amplitudes_of_queries_and_keys(amplitude, is_causal):
    query, key, value = random_operands(1, 2, 2, 129, 129, 64, torch.bfloat16)
    query = (query * amplitude).clamp(-6e4, 6e4)
    output = piper_attention(query, key, value, is_causal=is_causal)
    assert output.isfinite().all()
    if amplitude < 1:  # larger logits select single keys, where INT8 codes decide
        exact = exact_attention(query, key, value, is_causal=is_causal)
        assert sqnr(output, exact) > 33


def test_huge_logits_select_one_key():
    query, key, value = random_operands(1, 1, 1, 65, 65, 64)
    key = torch.zeros_like(key)
    key[0, 0, 7], query = 6e4, torch.full_like(query, 6e4)
    output = piper_attention(query, key, value)
    torch.testing.assert_close(output, value[:, :, 7:8].expand_as(output), atol=0.02, rtol=0.02)


def test_views_into_one_projection(nan_filled_memory):
    packed = torch.randn(2, 129, 4 * 64 * 3 + 8, generator=torch.Generator().manual_seed(3)).half()
    query, key, value = (
        packed[..., start : start + 256].unflatten(-1, (4, 64)).transpose(1, 2)
        for start in (0, 256, 512)
    )
    dense = [x.contiguous() for x in (query, key, value)]
    assert torch.equal(piper_attention(query, key, value), piper_attention(*dense))
    every_second = [x[:, :, ::2] for x in (query, key, value)]
    contiguous = [x.contiguous() for x in every_second]
    assert torch.equal(piper_attention(*every_second), piper_attention(*contiguous))


def test_scale_is_a_factor_of_the_logits():
    operands = random_operands(1, 1, 1, 65, 129, 64)
    for scale in (0.01, 0.3):
        output = piper_attention(*operands, scale=scale)
        assert sqnr(output, exact_attention(*operands, scale=scale)) > 30
    assert torch.equal(piper_attention(*operands, scale=0.125), piper_attention(*operands))


def test_an_empty_batch_is_empty():
    operands = random_operands(0, 4, 2, 9, 9, 64)
    assert piper_attention(*operands).shape == (0, 4, 9, 64)


def test_inputs_are_not_changed():
    operands = random_operands(1, 2, 1, 65, 65, 64)
    before = [x.clone() for x in operands]
    piper_attention(*operands, is_causal=True)
    assert all(torch.equal(x, y) for x, y in zip(operands, before, strict=True))
