"""The maths and the indices of the Gluon preparation, emulated on the CPU."""

import pytest
import torch

from piper_kernels.conv3d.convrot.int8 import reference
from piper_kernels.conv3d.convrot.int8._geometry import padding_flags
from piper_kernels.conv3d.convrot.int8._operands import Filter, Normalization, check

hopper = pytest.importorskip("piper_kernels.conv3d.convrot.int8._nvidia.hopper_preparation")

from voxel_emulation import Pointer, emulated  # noqa: E402

from piper_kernels.conv3d.convrot.int8._nvidia import (  # noqa: E402
    hopper_preparation_kernel,
    hopper_rotation,
)

UNWRITTEN = 0x55
CASES = [
    ((1, 64, 1, 2, 2), 64, "reflect", (1, 1, 1), torch.float16, False, False),
    ((1, 64, 1, 3, 3), 16, "reflect", (1, 1, 1), torch.float16, True, False),
    ((2, 128, 2, 5, 26), 64, "reflect", (1, 2, 2), torch.float16, False, False),
    ((1, 128, 1, 4, 16), 64, "none", (1, 2, 3), torch.float32, True, False),
    ((1, 256, 1, 3, 21), 256, "reflect_right", (2, 2, 2), torch.float16, True, False),
    ((1, 256, 1, 8, 8), 256, "reflect", (1, 1, 1), torch.float16, False, True),
    ((1, 128, 2, 3, 5), 64, "reflect_right", (1, 1, 1), torch.float32, True, True),
]


def run(x, weight, geometry, norm):
    """Return codes of every program of the kernel in turn; what none writes is ``UNWRITTEN``."""
    plan = hopper.plan_voxels(weight.group_size, geometry.channels)
    stored = (geometry.stored_height, geometry.stored_width)
    frames = geometry.batch * geometry.frames
    codes = torch.full((frames, *stored, geometry.channels), UNWRITTEN, dtype=torch.int8)
    n, c, t, h, w = x.stride()
    storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    tiles = -(-geometry.height * geometry.width // plan.voxels)
    numbers, groups = [weight.input_scale.view(1)] * 4, 0
    if norm is not None:
        groups = norm.groups
        exact = x.double().view(geometry.batch, groups, -1, *x.shape[2:])
        spread, mean = torch.var_mean(exact, dim=(2, 4, 5), correction=0)
        spread = (spread + norm.epsilon).rsqrt()
        numbers = [part.transpose(1, 2).flatten().float() for part in (mean, spread)]
        numbers += [norm.weight, norm.bias]
    for program in range(frames * tiles * (geometry.channels // (64 * plan.blocks))):
        functions = emulated((hopper_rotation, hopper_preparation_kernel), program)
        functions["hopper_prepare_kernel"](
            Pointer(storage, x.storage_offset()), Pointer(codes.view(torch.int32).view(-1)),
            Pointer(weight.input_scale.view(1)), *map(Pointer, numbers), geometry.frames,
            geometry.height, geometry.width, stored[1], stored[0] * stored[1], tiles, groups,
            n, t, c, h, w, CHANNELS=geometry.channels, VOXELS=plan.voxels, BLOCKS=plan.blocks,
            GROUP=weight.group_size, NORM_CHANNELS=geometry.channels // groups if groups else 0,
            BEFORE=geometry.before, AFTER=geometry.after, FLAT=h == w * geometry.width,
            LAST=c == 1, LOAD=None, SHARED=None, STORE=None,
        )  # fmt: skip
    return codes


@pytest.mark.parametrize(
    ("shape", "group", "padding", "stride", "dtype", "last", "normalized"), CASES
)
def test_equals_the_reference(shape, group, padding, stride, dtype, last, normalized):
    generator = torch.Generator().manual_seed(3)
    weight = Filter(
        torch.zeros((1, 3, 3, 3, shape[1]), dtype=torch.int8),
        torch.ones((1, 1)), None, group, torch.tensor(0.031),
    )  # fmt: skip
    x = torch.randn(shape, generator=generator).to(dtype)
    if last:
        x = x.to(memory_format=torch.channels_last_3d)
    elif shape[4] == 26:  # pixels that are not equally far apart
        x = torch.nn.functional.pad(x, (3, 2), value=torch.nan)[..., 3:-2]
    geometry = check(x, weight, stride, padding_flags(padding), None)
    norm = None
    if normalized:
        parameters = torch.rand((2, shape[1]), generator=generator) + 0.5
        norm = Normalization(parameters[0], parameters[1] - 1, 8, 1e-6)
    codes = run(x, weight, geometry, norm)
    height = geometry.height + geometry.before + geometry.after
    width = geometry.width + geometry.before + geometry.after
    expected = reference.pad(reference.prepare_input(x, group, weight.input_scale, norm), geometry)
    written = codes.view(shape[0], shape[2], *codes.shape[1:])[:, :, :height, :width]
    difference = (written.int() - expected[:, 2:].int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).double().mean() < 2e-3
    assert (codes[:, height:] == UNWRITTEN).all()
    assert (codes[:, :, width:] == UNWRITTEN).all()


@pytest.mark.parametrize("last", [False, True])
def test_huge_voxels_saturate_and_others_do_not_notice(last):
    x = torch.randn((1, 64, 1, 3, 3), generator=torch.Generator().manual_seed(4))
    x[0, :, 0, 0, 0] = 3e37 * x[0, :, 0, 0, 0].sign()
    x[0, 0, 0, 1, 1], x[0, 1, 0, 2, 2] = torch.nan, torch.inf
    x = x.to(memory_format=torch.channels_last_3d) if last else x
    qdata = torch.zeros((1, 3, 3, 3, 64), dtype=torch.int8)
    weight = Filter(qdata, torch.ones((1, 1)), None, 64, torch.tensor(0.03))
    geometry = check(x, weight, (1, 1, 1), padding_flags("none"), None)
    codes = run(x, weight, geometry, None).view(9, 64).int()
    assert set(codes[0].unique().tolist()) == {-128, 127}
    others = [1, 2, 3, 5, 6, 7]
    expected = reference.prepare_input(x, 64, weight.input_scale).view(9, 64)[others].int()
    assert (codes[others] - expected).abs().max() <= 1
