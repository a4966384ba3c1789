"""Permutation of the keys of transposed values that are stored in their order."""

# ruff: noqa: ANN001, ANN202  # the types of device functions are their docstrings
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from piper_kernels.attention._preparation._code_kernels import biased_sums

_PAIRS = tl.constexpr(64)


@triton.jit(do_not_specialize=["tiles"])
def repack_kernel(
    codes,
    multiplier,
    permuted,
    log_max,
    value_sum,
    tiles,
    D: tl.constexpr,
    PER_TILE: tl.constexpr,
):
    """Permute 128 keys of one head, sum their codes and take logarithms of their scales.

    Args:
        codes: Pairs of INT8 codes as int16 ``[heads, D, 32 * tiles]``.
        multiplier: FP32 ``[heads, 64 * tiles]``, 255 times the scale of a key; or
            ``[heads, tiles]``.
        permuted: int16 ``[heads, D, 32 * tiles]``.
        log_max: FP32 ``[heads, tiles]``, the base-2 logarithm of the largest scale.
        value_sum: int32 ``[heads, sums, D]``, ``biased_sums`` of 128 keys.
        tiles: Tiles of 64 keys.
        D: Features.
        PER_TILE: Whether 64 keys share a scale.
    """
    group, lead = tl.program_id(0), tl.program_id(1).to(tl.int64)
    feature, slot = tl.arange(0, D), tl.arange(0, _PAIRS)
    # Slot 8 h + 2 t + a of 16 pairs holds pair 8 h + 4 a + t.
    pair = slot - slot % 8 + 4 * (slot % 2) + slot % 8 // 2
    mask = group * _PAIRS + slot < 32 * tiles
    row = (lead * D + feature)[:, None] * (32 * tiles) + group * _PAIRS
    both = tl.load(codes + row + pair[None, :], mask=mask[None, :], other=0)
    tl.store(permuted + row + slot[None, :], both, mask=mask[None, :])
    words = both.to(tl.int32)
    total = tl.sum((words >> 8) + (words << 24 >> 24), axis=1)
    tl.store(
        value_sum + (lead * tl.num_programs(0) + group) * D + feature, biased_sums(total, group)
    )
    for part in tl.static_range(2):
        tile = 2 * group + part
        if tile < tiles:
            if PER_TILE:
                largest = tl.load(multiplier + lead * tiles + tile)
            else:
                key = tl.arange(0, 64)
                largest = tl.max(tl.load(multiplier + (lead * tiles + tile) * 64 + key), axis=0)
            tl.store(log_max + lead * tiles + tile, tl.log2(largest / 255.0))
