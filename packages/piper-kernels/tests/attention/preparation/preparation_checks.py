"""Numeric checks of the preparation kernels against the portable reference on the CPU.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

from unittest.mock import patch

import torch
from preparation_comparison import (
    BRAIN,
    DEVICE,
    FULL,
    HALF,
    THREAD,
    WARP,
    assert_codes,
    assert_floats,
    code_sums,
    log_maxima,
    normal,
    on_device,
    operands,
    permuted,
)
from sparse_preparation_checks import check_routes, check_sparse
from torch.nn import functional

from piper_kernels.attention._preparation import _launch, _statistics, dense
from piper_kernels.attention.piper_attention import prepared
from piper_kernels.attention.sage_attention_2pp import reference as sage


def check_piper(query, key, value, granularity, is_causal, fraction=1e-3):
    scale = query.shape[-1] ** -0.5
    actual = dense.prepare_piper(
        *on_device(query, key, value), scale=scale, is_causal=is_causal, granularity=granularity
    )
    expected = prepared.prepare(
        query, key, value, scale=scale, is_causal=is_causal, granularity=granularity, padded=True
    )
    rows, key_rows = query.shape[2], key.shape[2]
    if granularity is WARP:
        rows, key_rows = -(-rows // 32), -(-key_rows // 64)
    assert_codes(actual.query_codes, expected.query_codes, "query", fraction)
    assert_floats(actual.query_scale[..., :rows], expected.query_scale[..., :rows], "query scale")
    assert bool(actual.query_scale.isfinite().all())
    ours, theirs = actual.key_value, expected.key_value
    assert_codes(ours.key_codes, theirs.key_codes, "key", fraction)
    # Sums of keys are rounded in another order: an error of the mean is one of every key.
    error = 1e-6 * float(key.float().abs().max()) / 127 * query.shape[-1] ** 0.5
    assert_floats(
        ours.key_scale[..., :key_rows], theirs.key_scale[..., :key_rows], "key scale", atol=error
    )
    assert bool(ours.key_scale.isfinite().all())
    assert_codes(ours.value_codes, permuted(theirs.value_codes), "value", fraction)
    error = 1e-6 * float(value.float().abs().max())
    assert_floats(
        ours.value_multiplier, theirs.value_multiplier, "value multiplier", atol=3 * error
    )
    assert torch.equal(ours.value_sum.cpu(), code_sums(ours.value_codes))
    maxima = log_maxima(ours.value_multiplier)
    assert_floats(ours.value_log_max, maxima, "value logarithm", atol=1e-5)
    if is_causal:
        assert ours.value_mean is None
    else:
        assert_floats(ours.value_mean, theirs.value_mean, "value mean", atol=error)
    parts = [x for x in (*vars(actual).values(), *vars(ours).values()) if torch.is_tensor(x)]
    assert all(x.is_contiguous() for x in parts)


def check_dense() -> None:
    cases = [
        (1, 1, 64, BRAIN, WARP, False),
        (65, 2, 128, HALF, THREAD, False),
        (63, 193, 64, BRAIN, THREAD, True),
        (33, 64, 128, FULL, WARP, True),
        (97, 257, 128, BRAIN, WARP, False),
        (64, 129, 64, FULL, THREAD, False),
    ]
    for rows, key_rows, head_dim, dtype, granularity, is_causal in cases:
        check_piper(*operands(rows, key_rows, head_dim, dtype), granularity, is_causal)
    check_piper(*operands(40, 70, 64, HALF, heads=4, kv_heads=2, batch=2), WARP, False)


def check_strided() -> None:
    packed = torch.full((2, 70, 4, 3, 200), torch.nan, dtype=BRAIN)
    packed[..., 8:72] = normal(2, 70, 4, 3, 64, dtype=BRAIN)
    query, key, value = packed[..., 8:72].permute(3, 0, 2, 1, 4)
    assert not query.is_contiguous()
    check_piper(query, key[:, ::2], value[:, ::2], WARP, False)


def check_special_rows() -> None:
    query, key, value = operands(70, 130, 64, HALF)
    query[:, :, 3], key[:, :, 5], value[:, :, 7] = 0, 0, 0
    query[:, :, 40:50] *= 1e4
    value[:, :, 9] = 6e4
    key[:, :, 11] = -6e4
    check_piper(query, key, value, WARP, True, 5e-3)
    tiny = [x * 1e-6 for x in operands(70, 130, 64, FULL)]
    check_piper(*tiny, THREAD, False, 5e-3)
    zeros = [torch.zeros_like(x) for x in (query, key, value)]
    check_piper(*zeros, WARP, False, 0)
    constant = value[:, :, 20:21].expand_as(value).contiguous()
    out = dense.prepare_piper_key_value(*on_device(key, constant), is_causal=False)
    assert_floats(out.value_mean, constant[:, :, 0].float(), "mean of constant values", rtol=2e-7)


def check_tile_scales() -> None:
    query, key, value = operands(64, 300, 64, BRAIN)
    out = dense.prepare_piper(
        *on_device(query, key, value), scale=0.1, is_causal=False, values_per_tile=True
    ).key_value
    assert out.value_multiplier is None
    centered = value.float() - value.float().mean(2, keepdim=True)
    tiles = functional.pad(centered, (0, 0, 0, 20)).unflatten(2, (-1, 64))
    scale = tiles.abs().amax((-2, -1)) / 127 + 1e-7
    assert_floats(out.value_log_max, scale.log2(), "tile logarithms", atol=1e-5)
    codes = (tiles / scale[..., None, None]).round().to(torch.int8).flatten(2, 3).mT
    assert_codes(out.value_codes, permuted(codes), "values of tiles")
    assert torch.equal(out.value_sum.cpu(), code_sums(out.value_codes))


def check_long_chunks() -> None:
    """Let programs handle several tiles, as they do where heads and rows are many."""
    with (
        patch.object(_statistics, "_PARTIAL_PROGRAMS", 1),
        patch.object(_statistics, "_SUMMARY_PROGRAMS", 1),
        patch.object(_launch, "_QUANTIZE_PROGRAMS", 1),
    ):
        check_piper(*operands(64, 577, 64, BRAIN), WARP, False)
        check_piper(*operands(321, 321, 128, HALF), THREAD, True)
        check_sparse()


def check_parts() -> None:
    query, key, value = on_device(*operands(100, 100, 128, BRAIN))
    whole = dense.prepare_piper(
        query, key, value, scale=0.1, is_causal=False, permuted=False, sums=False
    )
    codes, scale = dense.prepare_query(query, scale=0.1)
    assert torch.equal(codes, whole.query_codes)
    assert torch.equal(scale, whole.query_scale)
    part = dense.prepare_piper_key_value(key, value, is_causal=False)
    for name in ("key_codes", "key_scale", "value_multiplier", "value_mean"):
        assert torch.equal(getattr(part, name), getattr(whole.key_value, name)), name
    assert whole.key_value.value_sum is None
    assert whole.key_value.value_log_max is None
    repacked = dense.repack_value(whole.key_value.value_codes, whole.key_value.value_multiplier)
    assert torch.equal(repacked[0], part.value_codes)
    assert_floats(repacked[1], part.value_log_max.cpu(), "repacked logarithms", atol=1e-6)
    assert torch.equal(repacked[2], part.value_sum)
    per_tile = whole.key_value.value_multiplier[..., ::64].contiguous()
    codes, logarithms, sums = dense.repack_value(whole.key_value.value_codes, per_tile)
    assert_floats(logarithms, (per_tile.cpu() / 255).log2(), "logarithms of tiles", atol=1e-6)
    assert torch.equal(codes, part.value_codes)
    assert torch.equal(sums, part.value_sum)


def check_sage() -> None:
    for rows, head_dim, dtype in ((65, 64, HALF), (130, 128, BRAIN)):
        tensors = operands(rows, rows, head_dim, dtype, heads=2, kv_heads=2)
        tensors[2][:, :, 1] = 0
        actual = dense.prepare_sage(*on_device(*tensors), scale=0.125)
        expected = sage.prepare(*tensors, granularity=WARP)
        padding = -rows % 64
        for name in ("query_codes", "key_codes"):
            wanted = functional.pad(getattr(expected, name), (0, 0, 0, padding))
            assert_codes(getattr(actual, name), wanted, name)
        factor = 0.125 * prepared.LOG2_E
        assert_floats(actual.query_scale[..., 0], expected.query_scale[..., 0] * factor, "query")
        assert_floats(actual.value_scale, expected.value_scale, "value scale")
        assert actual.value_codes.dtype == torch.float8_e4m3fn
        wanted = permuted(functional.pad(expected.value_codes.float().mT, (0, padding)))
        ours = actual.value_codes.cpu().float()
        if DEVICE == "cpu":  # the interpreter loses carries of the mantissa into the exponent
            carried = (wanted.abs().log2() % 1 == 0) | (wanted.abs() < 2**-6)
            ours = torch.where(carried, wanted, ours)
        # A quotient one step away rounds to the neighbour, an eighth of the number apart.
        assert ((ours - wanted).abs() <= 0.13 * wanted.abs() + 0.002).all()
        assert (ours != wanted).double().mean() < 1e-3


def main() -> None:
    torch.use_deterministic_algorithms(True)  # fills what nobody wrote with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    check_dense()
    check_strided()
    check_special_rows()
    check_parts()
    check_tile_scales()
    check_long_chunks()
    check_sage()
    check_sparse()
    check_routes()
    print("preparation checks passed")


if __name__ == "__main__":
    main()
