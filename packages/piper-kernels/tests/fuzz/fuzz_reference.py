"""Float64 references of the formats, from their definitions and not from the package."""

import torch

H4 = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)
EPS = 2.0**-23


def rotate(values, group):
    """Rotate float64 groups of the last axis by butterflies of H4; ``group`` 0 does not."""
    if group == 0:
        return values.double()
    shape = values.shape
    blocks = values.double().reshape(-1, group)
    stride = 1
    while stride < group:
        quartets = blocks.reshape(-1, group // (4 * stride), 4, stride)
        blocks = torch.einsum("ij,bqjs->bqis", H4, quartets).reshape(-1, group)
        stride *= 4
    return (blocks / group**0.5).reshape(shape)


def int8_scale(rotated):
    """Return ``max(amax / 127, 1e-30)`` by rows ``[R, 1]``."""
    return (rotated.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)


def assert_int8_codes(codes, scale, rotated, magnitude, group, *, stochastic=False):
    """Check codes and scales of rows whose exact rotated values are known.

    FP32 arithmetic errs by a small multiple of eps times the size of what was summed, so a
    code may differ from the exact ratio by half a step and that error.

    Args:
        codes: int8 ``[R, K]``.
        scale: FP32 ``[R, 1]``.
        rotated: float64 ``[R, K]``.
        magnitude: float64 ``[R, 1]``, a bound of the summands of ``rotated``.
        group: Rotation group.
        stochastic: Whether either neighbour of the exact ratio is right.
    """
    exact = int8_scale(rotated)
    slack = 8 * EPS * group**0.5 * magnitude
    difference = (scale.double() - exact).abs()
    assert (difference <= slack / 127 + 4 * EPS * exact).all(), (scale, exact)
    ratio = rotated / scale.double()
    allowed = (1 if stochastic else 0.5) + 127 * 4 * EPS + slack / scale.double()
    worst = (codes.double() - ratio).abs() - allowed
    assert (worst <= 0).all(), (codes[worst > 0], ratio[worst > 0])


def int8_dense(codes, scale, group):
    return rotate(codes.double() * scale.double(), group)


def assert_rounded(actual, exact, magnitude, dtype, group=256):
    """Check values that were computed in FP32 from ``exact`` and rounded to ``dtype`` once."""
    info = torch.finfo(dtype)
    slack = 8 * EPS * group**0.5 * magnitude
    # Matrix products may flush subnormal summands to zero.
    flushed = torch.finfo(torch.float32).tiny * group
    allowed = exact.abs() * info.eps + slack + info.smallest_normal * info.eps + flushed
    found = actual.double()
    overflow = exact.abs() + slack >= info.max * (1 - info.eps)
    close = (found - exact).abs() <= allowed
    wrong = ~(close | (overflow & found.isinf()))
    assert not wrong.any(), (actual[wrong][:8], exact[wrong][:8])


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E2M1 = torch.cat((E2M1, -E2M1))
MIN_LEVEL = 2.0**-120


def e4m3_values(data):
    """Decode non-negative E4M3FN bytes by exponent and mantissa; NaN stays NaN."""
    byte = data.contiguous().view(torch.uint8).long()
    assert (byte < 0x80).all(), "a block scale is negative"
    exponent, mantissa = byte >> 3, byte & 7
    normal = (1 + mantissa / 8).double() * 2.0 ** (exponent - 7).double()
    values = torch.where(exponent > 0, normal, mantissa.double() / 8 * 2.0**-6)
    return values.masked_fill(byte == 0x7F, torch.nan)


def nvfp4_scale_offsets(rows, blocks):
    """Return where the 128x4 layout keeps the scale of each row and block ``[rows, blocks]``."""
    columns = (blocks + 3) // 4
    offsets = torch.empty(rows, blocks, dtype=torch.long)
    for row in range(rows):
        for block in range(blocks):
            tile = row // 128 * columns + block // 4
            inside = row % 128
            offsets[row, block] = (tile * 32 + inside % 32) * 16 + inside // 32 * 4 + block % 4
    return offsets


def nvfp4_parts(weight):
    """Return codes ``[R, K]``, float64 block scales ``[R, K / 16]`` and the global scale."""
    rows, features = weight.shape
    packed = weight.qdata.long()
    low, high = packed & 15, packed >> 4
    pair = (high, low) if weight.high_first else (low, high)
    codes = torch.stack(pair, -1).reshape(rows, features)
    flat = e4m3_values(weight.scale.reshape(-1))
    if weight.is_swizzled_scales:
        offsets = nvfp4_scale_offsets(rows, features // 16)
        scale = flat[offsets]
        padding = flat.clone()
        padding[offsets.flatten()] = 0
        assert not padding.any(), "padding of swizzled scales must be zero"
    else:
        scale = flat.view(rows, features // 16)
    level = weight.per_tensor_scale
    return codes, scale, 1.0 if level is None else level.double().item()


def nvfp4_stored(weight):
    """Return the values ``[R, K]`` in the basis of the codes, as float64.

    The format multiplies in FP32: the two scales first, then the code.
    """
    codes, scale, level = nvfp4_parts(weight)
    combined = (scale.float() * level).repeat_interleave(16, -1)
    return (E2M1.float()[codes] * combined).double()


def assert_nvfp4_codes(weight, exact, magnitude, group, *, computed_level, stochastic=False):
    """Check storage whose exact values in the basis of the codes are known.

    Args:
        weight: The weight.
        exact: float64 ``[R, K]``.
        magnitude: float64 ``[R, 1]``, a bound of the summands of ``exact``.
        group: Rotation group, 0 for none.
        computed_level: Whether the global scale must be ``amax / 2688``.
        stochastic: Whether either neighbour of the exact ratio is right.
    """
    codes, scale, level = nvfp4_parts(weight)
    slack = 8 * EPS * max(group, 1) ** 0.5 * magnitude
    if computed_level:
        wanted = max(exact.abs().max().item() / 2688, MIN_LEVEL)
        assert abs(level - wanted) <= 8 * EPS * wanted + slack.max().item() / 2688
    target = exact.reshape(*scale.shape, 16).abs().amax(-1) / 6 / level
    target_slack = (slack / 6 / level) + 8 * EPS * target
    clamped = target.clamp(2.0**-6, 448)
    # E4M3 has three mantissa bits: the nearest value is at most 2**-4 away, relatively.
    ulp = 2.0 ** (clamped.log2().floor() - 3)
    assert ((scale - clamped).abs() <= ulp / 2 + target_slack).all(), (scale, clamped)
    step = (scale * level).repeat_interleave(16, -1)
    ratio = exact / step
    bounded = ratio.clamp(-6, 6)
    ratio_slack = slack / step + 8 * EPS * bounded.abs() + 1e-12
    distance = (E2M1[codes] - bounded).abs()
    if stochastic:
        above = torch.where(bounded[..., None] <= E2M1, E2M1, torch.inf).amin(-1)
        below = torch.where(bounded[..., None] >= E2M1, E2M1, -torch.inf).amax(-1)
        # Next to a level its other neighbour counts too, within FP32 accuracy; the widest gap is 2.
        near = (E2M1 - bounded[..., None]).abs().amin(-1) <= ratio_slack
        nearest = torch.where(near & (distance > 0), 2.0, above - below)
        assert (distance <= nearest + ratio_slack).all(), (E2M1[codes], bounded)
        return
    nearest = (E2M1 - bounded[..., None]).abs().amin(-1)
    assert (distance <= nearest + 2 * ratio_slack).all(), (E2M1[codes], bounded)
    sure = exact.abs() > slack
    assert torch.equal((codes >= 8)[sure], (exact < 0)[sure]), "a sign is lost"
