"""Channel norm and sums of channels-last maps against their references.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import sys
from itertools import product

import torch

from phyai.models.cosmos3.vae import rows
from phyai.models.cosmos3.vae.spread import spread
from phyai.triton import channel_rows

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
# The interpreter cuts values off where a GPU rounds them to bf16.
STEPS = {torch.float32: 1e-6, torch.bfloat16: 4e-3 if DEVICE == "cuda" else 8e-3}
SHAPES = ((1, 1), (3, 7), (17, 160), (2, 2, 1024))
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=GENERATOR).to(device=DEVICE, dtype=dtype)


def close(found, expected, what):
    assert found.dtype == expected.dtype
    error = (found.double() - expected.double()).norm()
    bound = STEPS[found.dtype] * expected.double().norm()
    assert error <= bound, (what, float(error), float(bound))


def norm(x, gain, bias, *, silu):
    """Returns the norm behind two frames of room, which must stay as they are."""
    buffer = torch.full((2, *x.shape), torch.nan, dtype=x.dtype, device=x.device)
    out = channel_rows.channel_norm(x, gain, bias, silu=silu, out=buffer[1])
    assert out.data_ptr() == buffer[1].data_ptr()
    assert buffer[0].isnan().all()
    return out


def reference(x, gain, bias, *, silu):
    """Computes in fp64, apart from what the model does on a CPU."""
    values = x.double() if bias is None else x.double() + bias.double()
    values = values / values.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-12) * gain.double()
    return (values * values.sigmoid() if silu else values).to(x.dtype)


def spread_sum(phases, bias, source, time, steps):
    """Computes position by position what the decoder's blocks end with."""
    frames, height, width, inputs = source.shape
    channels = len(bias)
    out = torch.zeros(frames * steps, 2 * height, 2 * width, channels, dtype=torch.float64)
    repeated = source.double().cpu().repeat_interleave(4 * time * channels // inputs, dim=-1)
    places = product(range(frames * steps), range(2 * height), range(2 * width))
    for frame, y, x in places:
        phase = phases[frame, y // 2 + y % 2, x // 2 + x % 2].double().cpu()
        part = (frame % steps + time - steps) * 4 + 2 * (y % 2) + x % 2
        given = repeated[frame // steps, y // 2, x // 2].view(channels, 4 * time)[:, part]
        out[frame, y, x] = (
            phase.view(4, channels)[2 * (y % 2) + x % 2] + bias.double().cpu() + given
        )
    return out.to(phases)


def check_spread():
    # Frames of a cell, frames made of one, channels behind and before.
    for time, steps, channels, inputs in (
        (1, 1, 7, 7), (1, 1, 8, 16), (2, 1, 8, 16), (2, 2, 5, 5), (2, 2, 8, 16), (2, 1, 129, 129),
    ):  # fmt: skip
        for dtype, frames in product(STEPS, (1, 2)):
            source = normal(frames, 3, 2, inputs, dtype=dtype)
            phases = normal(frames * steps, 4, 3, 4 * channels, dtype=dtype)
            bias = normal(channels, dtype=dtype)
            expected = spread_sum(phases, bias, source, time, steps)
            what = (time, steps, channels, inputs, dtype)
            close(channel_rows.spread(phases, bias, source, time), expected, what)
            if DEVICE == "cpu":
                close(spread(phases, bias, source, (time, 2, 2)), expected, ("portable", *what))


def main():
    check_spread()
    for dtype, shape in product(STEPS, SHAPES):
        x, gain = normal(*shape, dtype=dtype), normal(shape[-1]) + 2
        bias, residual = normal(shape[-1], dtype=dtype), normal(*shape, dtype=dtype)
        for shift, silu in product((None, bias), (False, True)):
            expected = reference(x, gain, shift, silu=silu)
            close(norm(x, gain, shift, silu=silu), expected, (dtype, shape, silu))
            if DEVICE == "cpu":
                portable = rows.channel_norm(x, gain, shift, silu=silu, out=torch.empty_like(x))
                close(portable, expected, ("portable", dtype, shape, silu))
        expected = (x.double() + bias.double() + residual.double()).to(dtype)
        if DEVICE == "cpu":
            close(rows.add_bias_residual(x.clone(), bias, residual), expected, "portable sum")
        found = channel_rows.add_bias_residual(x, bias, residual)
        assert found.data_ptr() == x.data_ptr()
        close(found, expected, (dtype, shape, "sum"))
    gain = normal(6)
    extremes = torch.tensor([0.0, 1e-18, 1e18], device=DEVICE)[:, None].expand(3, 6).contiguous()
    found = norm(extremes, gain, None, silu=False)
    assert not found[0].any()
    close(found[2], gain / 6**0.5, "huge rows")
    close(found[1], gain * 1e-18 / 1e-12, "rows below the least length")
    empty = torch.empty(0, 6, device=DEVICE)
    assert channel_rows.channel_norm(empty, gain, None, silu=True, out=empty).shape == (0, 6)
    assert channel_rows.add_bias_residual(empty, gain, empty).shape == (0, 6)
    print("checks passed")


if __name__ == "__main__":
    main()
