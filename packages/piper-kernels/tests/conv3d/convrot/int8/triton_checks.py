"""Numeric checks of the convolution kernels against the portable reference on the CPU.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import sys
from contextlib import contextmanager

import torch

from piper_kernels.conv3d.convrot.int8 import _launch, _plan, reference
from piper_kernels.conv3d.convrot.int8._geometry import padding_flags
from piper_kernels.conv3d.convrot.int8._operands import Filter, Normalization, check
from piper_kernels.conv3d.convrot.int8._tiles import ConvolutionPlan

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
PROCESSORS = 3
SMALL = ConvolutionPlan(16, 16, 32, num_warps=4, num_stages=2)


def make(shape, outputs, group, stride=(1, 1, 1), padding="none", dtype=torch.float16, seed=0):
    """Return input, filter, geometry and residual on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    channels = shape[1]
    codes = torch.randint(-128, 128, (outputs, 3, 3, 3, channels), generator=generator)
    scale = torch.rand((outputs, 1), generator=generator) * 1e-3
    bias = torch.randn(2 * outputs, generator=generator).half()[::2]
    weight = Filter(codes.to(torch.int8), scale, bias, group, torch.tensor(0.03125))
    x = torch.randn(shape, generator=generator).to(dtype)
    geometry = check(x, weight, stride, padding_flags(padding), None)
    residual = torch.randn(geometry.out_shape, generator=generator).half()
    return x, weight, geometry, residual


def moved(weight):
    parts = (weight.qdata, weight.scale, weight.bias)
    q, s, b = (part.to(DEVICE) for part in parts)
    return Filter(q, s, b, weight.group_size, weight.input_scale.to(DEVICE))


def padded(codes, geometry):
    """The codes of a padded frame without what only completes a step of the stride."""
    return reference.pad(codes, geometry)[:, 2:]


def stored(codes, geometry):
    frames = codes.view(geometry.batch, geometry.frames, *codes.shape[1:])
    height = geometry.height + geometry.before + geometry.after
    width = geometry.width + geometry.before + geometry.after
    return frames[:, :, :height, :width].cpu()


def prepare(x, weight, geometry, norm=None):
    tile = _plan.plan_voxels(weight.group_size)
    return _launch.prepare_voxels(x, weight, geometry, tile, norm, PROCESSORS)


def require_codes(actual, expected, share=0.01):
    difference = (actual.int() - expected.int()).abs()
    assert difference.max() <= 1, difference.max()
    assert (difference > 0).double().mean() < share, (difference > 0).double().mean()


def check_codes():
    cases = [
        ((1, 64, 1, 5, 7), 64, "reflect", (1, 1, 1), torch.float16, (0, 1, 2)),
        ((2, 128, 2, 5, 6), 64, "reflect_right", (2, 2, 2), torch.float32, (2,)),
        ((1, 256, 2, 3, 11), 256, "none", (1, 2, 3), torch.float16, (0,)),
        ((1, 64, 2, 4, 4), 16, "none", (1, 1, 1), torch.float16, (1,)),
    ]
    for shape, group, padding, stride, dtype, chosen in cases:
        x, weight, geometry, _ = make(shape, 3, group, stride, padding, dtype)
        expected = padded(reference.prepare_input(x, group, weight.input_scale), geometry)
        wide = torch.full((*shape[:-1], 2 * shape[-1]), torch.nan, dtype=dtype)
        wide[..., ::2] = x
        layouts = (x, x.to(memory_format=torch.channels_last_3d), wide[..., ::2])
        for layout in chosen:
            codes = prepare(layouts[layout].to(DEVICE), moved(weight), geometry)
            require_codes(stored(codes, geometry), expected)
    # Outliers saturate at -128 and 127, and other voxels do not notice.
    x, weight, geometry, _ = make((1, 64, 1, 3, 3), 3, 16)
    x[0, :, 0, 1, 1] = 6e4
    x[0, :, 0, 2, 2] = -6e4
    codes = prepare(x.to(DEVICE), moved(weight), geometry)
    expected = padded(reference.prepare_input(x, 16, weight.input_scale), geometry)
    require_codes(stored(codes, geometry), expected)
    assert codes.min() == -128
    assert codes.max() == 127


@contextmanager
def small_parts():
    """Make statistics of several programs with several tiles each."""
    usual = _launch.plan_statistics
    _launch.plan_statistics = lambda *_: (16, 2)
    try:
        yield
    finally:
        _launch.plan_statistics = usual


def check_norm():
    for channels, groups, offset, dtype in (
        (64, 4, 0.0, torch.float16),
        (128, 8, 1000.0, torch.float32),
        (64, 1, -1000.0, torch.float32),
    ):
        group, shape = 64, (2, channels, 1, 7, 13) if channels == 64 else (1, channels, 2, 3, 5)
        x, weight, geometry, _ = make(shape, 3, group, padding="reflect")
        x = (x.float() * 0.5 + offset).to(dtype)
        generator = torch.Generator().manual_seed(1)
        parameters = 0.5 + torch.rand((2, channels), generator=generator)
        norm = Normalization(parameters[0], parameters[1].half() - 1, groups, 1e-6)
        # The reference in FP64, as the offset is.
        exact = x.double().reshape(shape[0], groups, -1, *shape[2:])
        spread, mean = torch.var_mean(exact, dim=(2, 4, 5), correction=0, keepdim=True)
        values = ((exact - mean) / (spread + 1e-6).sqrt()).view(shape)
        one = (1, channels, 1, 1, 1)
        values = values * norm.weight.double().view(one) + norm.bias.double().view(one)
        values = (values * values.sigmoid()).float()
        expected = reference.prepare_input(values, group, weight.input_scale)
        on_device = Normalization(norm.weight.to(DEVICE), norm.bias.to(DEVICE), groups, 1e-6)
        portable = reference.prepare_input(x, group, weight.input_scale, norm)
        require_codes(portable, expected)
        layouts = (x, x.to(memory_format=torch.channels_last_3d))
        for source in layouts[: 2 if groups == 4 else 1]:
            with small_parts():
                codes = prepare(source.to(DEVICE), moved(weight), geometry, on_device)
            require_codes(stored(codes, geometry), padded(expected, geometry))
    # A large first value, which the statistics refer to, and a frame without deviation.
    x, weight, geometry, _ = make((1, 64, 2, 9, 9), 3, 64)
    x[0, 0, 0, 0, 0] = 6e4
    x[0, :, 1] = 7.0
    norm = Normalization(torch.ones(64), torch.zeros(64), 2, 1e-6)
    on_device = Normalization(norm.weight.to(DEVICE), norm.bias.to(DEVICE), 2, 1e-6)
    codes = prepare(x.to(DEVICE), moved(weight), geometry, on_device)
    expected = reference.prepare_input(x, 64, weight.input_scale, norm)
    require_codes(stored(codes, geometry), expected)
    assert not stored(codes, geometry)[:, 1].any()


def check_products():
    cases = [
        ((2, 64, 1, 4, 5), 16, "reflect", (1, 1, 1)),
        ((2, 64, 3, 4, 5), 17, "reflect_right", (2, 2, 2)),
        ((1, 64, 3, 3, 3), 1, "none", (1, 1, 1)),
        ((1, 64, 4, 3, 5), 5, "reflect", (3, 1, 2)),
    ]
    for index, (shape, outputs, padding, stride) in enumerate(cases):
        _launch.WIDE = 1 << 31 if index else 0
        x, weight, geometry, residual = make(shape, outputs, 64, stride, padding)
        codes = prepare(x.to(DEVICE), moved(weight), geometry)
        # Bias and residual take turns; the first case is run both ways.
        for bias in ((True, False), (False,), (True,), (False,))[index]:
            used = weight if bias else Filter(weight.qdata, weight.scale, None, 64,
                                              weight.input_scale)  # fmt: skip
            given = residual if bias else None
            expected = finish(stored(codes, geometry), used, geometry, given)
            on_device = moved(weight) if bias else Filter(
                weight.qdata.to(DEVICE), weight.scale.to(DEVICE), None, 64,
                weight.input_scale.to(DEVICE),
            )  # fmt: skip
            actual = _launch.convolve(
                codes, on_device, geometry, None if given is None else given.to(DEVICE), SMALL
            )
            assert torch.equal(actual.cpu(), expected)


def finish(codes, weight, geometry, residual):
    """The reference of everything after preparation, from codes padded in space."""
    plain = codes.narrow(2, geometry.before, geometry.height)
    plain = plain.narrow(3, geometry.before, geometry.width)
    values = reference.convolve(plain, weight.qdata, geometry).float()
    values = values * weight.input_scale * weight.scale.view(-1)
    if weight.bias is not None:
        values = values + weight.bias
    values = values.permute(0, 4, 1, 2, 3)
    return (values if residual is None else values + residual).half().contiguous()


if __name__ == "__main__":
    check_codes()
    check_norm()
    check_products()
    print("kernel checks passed")
