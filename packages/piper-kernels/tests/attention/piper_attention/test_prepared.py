"""Prepared storage: its layout, and that attention of it is the operator."""

import math

import pytest
import torch
from attention_oracle import exact_attention, random_operands, sqnr

from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.piper_attention import prepared, reference

causal = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
granularities = pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.name)
# Of a native backend against the reference.
MEAN_ERROR, MAX_ERROR = 0.003, 0.12


@granularities
@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (33, 65), (64, 64), (65, 130)])
def test_layout(queries, keys, padded, granularity):
    query, key, value = random_operands(2, 6, 2, queries, keys, 64, seed=keys)
    stored = prepared.prepare(
        query, key, value, scale=0.125, granularity=granularity, padded=padded
    )
    rows, key_rows = ((x + 63) // 64 * 64 if padded else x for x in (queries, keys))
    per_warp = granularity is Granularity.PER_WARP
    kv = stored.key_value
    shapes = {
        "query_codes": (2, 6, rows, 64),
        "query_scale": (2, 6, math.ceil(rows / 32) if per_warp else rows),
        "key_codes": (2, 2, key_rows, 64),
        "key_scale": (2, 2, math.ceil(key_rows / 64) if per_warp else key_rows),
        "value_codes": (2, 2, 64, key_rows),
        "value_multiplier": (2, 2, key_rows),
        "value_log_scale": (2, 2, key_rows),
        "value_mean": (2, 2, 64),
    }
    for name, shape in shapes.items():
        tensor = getattr(stored if name.startswith("query") else kv, name)
        assert tensor.shape == shape, name
        assert tensor.is_contiguous(), name
        assert tensor.dtype == (torch.int8 if "codes" in name else torch.float32), name
        assert tensor.float().isfinite().all(), name
    assert not stored.query_codes[:, :, queries:].any()
    assert not kv.key_codes[:, :, keys:].any()
    assert not kv.value_codes[..., keys:].any()


@granularities
def test_contents_are_those_of_the_reference_in_base_two(granularity):
    query, key, value = random_operands(1, 2, 1, 70, 130, 128)
    stored = prepared.prepare(query, key, value, scale=0.3, granularity=granularity)
    wanted = reference.prepare(query, key, value, granularity=granularity)
    kv = stored.key_value
    assert torch.equal(stored.query_codes, wanted.query_codes)
    assert torch.equal(kv.key_codes, wanted.key_codes)
    assert torch.equal(kv.value_codes.mT, wanted.value_codes)
    step, key_step = (32, 64) if granularity is Granularity.PER_WARP else (1, 1)
    torch.testing.assert_close(
        stored.query_scale, wanted.query_scale[..., ::step] * (0.3 / math.log(2))
    )
    assert torch.equal(kv.key_scale, wanted.key_scale[..., ::key_step])
    torch.testing.assert_close(kv.value_multiplier, 255 * wanted.value_scale)
    torch.testing.assert_close(kv.value_log_scale, wanted.value_scale.log2())


@causal
@granularities
@pytest.mark.parametrize("derived", [False, True], ids=["logarithm", "bound"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_of_it_is_the_operator(head_dim, derived, granularity, is_causal):
    operands = random_operands(1, 4, 2, 193, 193, head_dim)
    scale = head_dim**-0.5
    stored = prepared.prepare(
        *operands,
        scale=scale,
        is_causal=is_causal,
        granularity=granularity,
        padded=True,
        derive_log_bound=derived,
    )
    assert (stored.key_value.value_log_scale is None) == derived
    output = prepared.attend(stored, query_length=193, key_length=193, is_causal=is_causal)
    wanted = reference.attention(*operands, scale, is_causal, granularity=granularity)
    error = (output - wanted.float()).abs()
    assert error.mean() < MEAN_ERROR
    assert error.max() < (MAX_ERROR if derived else 0.01)
    assert sqnr(output, exact_attention(*operands, is_causal=is_causal)) >= 34


@causal
def test_windows_of_queries_are_parts_of_the_whole(is_causal):
    operands = random_operands(1, 4, 1, 200, 200, 64)
    stored = prepared.prepare(*operands, scale=0.125, is_causal=is_causal)
    lengths = {"key_length": 200, "is_causal": is_causal}
    whole = prepared.attend(stored, query_length=200, **lengths)
    buffer = torch.full((1, 200, 4, 64), float("nan")).transpose(1, 2)
    for start, rows in ((0, 64), (64, 128), (192, 8)):
        part = buffer[:, :, start : start + rows]
        returned = prepared.attend(
            stored, query_length=rows, query_start=start, out=part, **lengths
        )
        assert returned is part
    assert torch.equal(buffer, whole)
    # A window that is stored alone knows its place.
    window = prepared.PreparedAttention(
        stored.query_codes[:, :, 128:192], stored.query_scale[..., 4:6], stored.key_value
    )
    alone = prepared.attend(window, query_length=64, query_origin=128, **lengths)
    assert torch.equal(alone, whole[:, :, 128:192])


def test_large_values_have_finite_multipliers():
    query, key, value = random_operands(1, 1, 1, 65, 65, 64)
    kv = prepared.prepare_key_value(key, torch.full_like(value, 40000), is_causal=True)
    assert kv.value_multiplier.dtype == torch.float32
    assert kv.value_multiplier.min() > 80000
    stored = prepared.PreparedAttention(
        *prepared.prepare_query(query, scale=0.125, granularity=Granularity.PER_WARP), kv
    )
    output = prepared.attend(stored, query_length=65, key_length=65, is_causal=True)
    torch.testing.assert_close(output, torch.full_like(output, 40000), rtol=0.01, atol=0)


def test_the_bound_of_the_logarithm_is_above_and_tight():
    multiplier = torch.exp2(torch.linspace(-25, 25, 200001))
    excess = prepared.log_scale_bound(multiplier) - (multiplier.double() / 255).log2()
    assert excess.min() >= 0
    assert excess.max() < 0.0862
