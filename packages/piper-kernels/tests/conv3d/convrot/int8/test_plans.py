"""Schedules and the geometry that kernels see; needs no device."""

import pytest
import torch

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.conv3d.convrot.int8 import _backend, _plan, reference
from piper_kernels.conv3d.convrot.int8._geometry import Geometry
from piper_kernels.conv3d.convrot.int8._nvidia import hopper_plan

GEOMETRIES = [
    Geometry(1, 64, 1, 5, 7, 70, (1, 1, 1), 1, 1),
    Geometry(2, 64, 3, 6, 9, 5, (2, 2, 2), 0, 1),
    Geometry(2, 128, 4, 7, 6, 130, (1, 2, 3), 0, 0),
    Geometry(1, 64, 5, 9, 33, 64, (3, 1, 2), 1, 1),
]


def target(name):
    return AcceleratorTarget("cuda" if name.startswith("sm") else "hip", name)


@pytest.mark.parametrize(
    "name", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx1200", "gfx1201"]
)
def test_native_targets(name):
    assert _plan.supports(target(name)) == (True, "")
    for outputs in (1, 64, 65, 1024):
        for channels in (64, 128, 4096):
            plan = _plan.select_plan(target(name), outputs, channels)
            assert channels % plan.depth == 0
            assert plan.outputs >= min(outputs, 64)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("sm_75", "sm_80 or newer"), ("gfx942", "gfx1200, gfx1201"), ("gfx1100", "got gfx1100")],
)
def test_other_targets_say_why(name, reason):
    usable, found = _plan.supports(target(name))
    assert not usable
    assert reason in found


def test_the_cpu_takes_the_reference():
    usable, reason = _backend.native_support(torch.device("cpu"))
    assert not usable
    assert "CUDA or ROCm" in reason
    assert _backend.select_backend(torch.device("cpu")) is reference


@pytest.mark.parametrize("group", [16, 64, 256])
def test_voxel_tiles_hold_whole_groups(group):
    tile = _plan.plan_voxels(group)
    assert tile.columns % group == 0
    assert tile.voxels * tile.columns == 8192


@pytest.mark.parametrize("positions", [1, 63, 4096, 512 * 512, 1080 * 1920])
@pytest.mark.parametrize("channels", [1, 4, 128])
@pytest.mark.parametrize("units", [1, 32, 4096])
def test_statistics_cover_a_frame(positions, channels, units):
    pixels, tiles = _plan.plan_statistics(positions, channels, units, 132)
    assert pixels & (pixels - 1) == 0
    assert pixels * channels <= 4096
    chunks = -(-positions // (pixels * tiles))
    assert (chunks - 1) * pixels * tiles < positions
    assert chunks <= max(1, 2 * 8 * 132 // units + 1)


@pytest.mark.parametrize("shape", [(512, 512), (7, 5), (33, 17), (1, 1), (64, 8)])
@pytest.mark.parametrize("outputs", [1, 32, 128, 1024])
def test_hopper_plans(shape, outputs):
    plan = hopper_plan.select_plan(outputs, 256, *shape, 5, 132)
    assert plan.depth == 128
    assert plan.voxels % 64 == 0
    assert hopper_plan.box_tiles(plan, *shape) * plan.voxels >= shape[0] * shape[1]
    assert hopper_plan.select_plan(outputs, 64, *shape, 5, 132).depth == 64
    shared = plan.stages * (plan.outputs + plan.voxels) * plan.depth
    assert plan.programs_per_sm * (shared + 2048) <= 228 * 1024


def test_hopper_prefers_full_boxes():
    plan = hopper_plan.select_plan(128, 128, 512, 512, 17, 132)
    assert (plan.outputs, plan.box_width) == (128, 32)
    narrow = hopper_plan.select_plan(128, 128, 512, 16, 17, 132)
    assert narrow.box_width == 16


@pytest.mark.parametrize("tile", hopper_plan.TILES, ids=str)
def test_parts_that_are_sent(tile):
    """Parts cover a tile row by row, and their buffers fit beside the ring."""
    hopper = pytest.importorskip("piper_kernels.conv3d.convrot.int8._nvidia.hopper")
    for width in hopper_plan.BOX_WIDTHS:
        if width > tile.voxels:
            continue
        plan = hopper_plan.HopperPlan(
            tile.outputs, tile.voxels // width, width, 128, tile.stages, tile.num_warps,
            tile.programs_per_sm, tile.buffers,
        )  # fmt: skip
        residual = torch.zeros(1)
        assert hopper.sends(plan, 64, None) == (width in (16, 32, 64))
        assert not hopper.sends(plan, 64, residual)
        assert not hopper.sends(plan, 60, None)
        if hopper.sends(plan, 64, None):
            *_, rows, columns = hopper.out_block(plan)
            parts = plan.voxels // hopper.SENT_VOXELS
            assert (parts * rows, columns) == (plan.box_height, width)
            # A part meets its buffer again in the next tile.
            assert parts % plan.buffers == 0
            ring = plan.stages * (plan.outputs + plan.voxels) * plan.depth
            buffers = plan.buffers * plan.outputs * hopper.SENT_VOXELS * 2
            assert plan.programs_per_sm * (ring + buffers + 2048) <= 228 * 1024


def box_of(view, at, block):
    """What TMA reads: zeros outside of the tensor."""
    box = torch.zeros(block, dtype=torch.int32)
    spans = [range(max(a, 0), min(a + b, s)) for a, b, s in zip(at, block, view.shape, strict=True)]
    if all(spans):
        source = tuple(slice(span.start, span.stop) for span in spans)
        place = tuple(
            slice(span.start - a, span.stop - a) for span, a in zip(spans, at, strict=True)
        )
        box[place] = view[source].int()
    return box


def emulate(codes, qdata, geometry, plan):
    """The Hopper kernel step by step: units, boxes, phases of the stride and skipped frames."""
    hopper = pytest.importorskip("piper_kernels.conv3d.convrot.int8._nvidia.hopper")
    shape, strides = hopper.code_view(geometry)
    view = codes.as_strided(shape, strides)
    block = hopper.code_block(plan)
    channels, (step_t, step_h, step_w) = geometry.channels, geometry.stride
    filters = qdata.view(geometry.outputs, -1)
    out = torch.full(geometry.out_shape, -1, dtype=torch.int32)
    steps = channels // plan.depth
    output_tiles = -(-geometry.outputs // plan.outputs)
    row_tiles = -(-geometry.out_height // plan.box_height)
    column_tiles = -(-geometry.out_width // plan.box_width)
    units = geometry.batch * geometry.out_frames * row_tiles * column_tiles * output_tiles
    for unit in range(units):
        output_tile, box = unit % output_tiles, unit // output_tiles
        column_tile, row_tile = box % column_tiles, box // column_tiles % row_tiles
        frame = box // (column_tiles * row_tiles)
        sample, t = divmod(frame, geometry.out_frames)
        source = sample * geometry.frames + t * step_t - 2
        total = torch.zeros((plan.outputs, plan.voxels), dtype=torch.int32)
        for step in range(max(2 - t * step_t, 0) * 9 * steps, 27 * steps):
            tap, channel = step // steps, step % steps * plan.depth
            dy, dx = tap // 3 % 3, tap % 3
            at = [
                source + tap // 9,
                row_tile * plan.box_height + dy // step_h,
                dy % step_h,
                column_tile * plan.box_width + dx // step_w,
                dx % step_w * channels + channel,
            ]
            right = box_of(view, at, block).view(plan.voxels, plan.depth)
            at = [output_tile * plan.outputs, tap * channels + channel]
            left = box_of(filters, at, [plan.outputs, plan.depth])
            total += left @ right.T
        rows = slice(row_tile * plan.box_height, (row_tile + 1) * plan.box_height)
        columns = slice(column_tile * plan.box_width, (column_tile + 1) * plan.box_width)
        outputs = slice(output_tile * plan.outputs, (output_tile + 1) * plan.outputs)
        target = out[sample, outputs, t, rows, columns]
        tile = total.view(plan.outputs, plan.box_height, plan.box_width)
        target.copy_(tile[tuple(slice(size) for size in target.shape)])
    return out


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_the_hopper_kernel_step_by_step(geometry):
    generator = torch.Generator().manual_seed(6)
    shape = (geometry.batch, geometry.frames, geometry.height, geometry.width, geometry.channels)
    plain = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    filters = (geometry.outputs, 3, 3, 3, geometry.channels)
    qdata = torch.randint(-128, 128, filters, generator=generator).to(torch.int8)
    padded = reference.pad(plain, geometry)[:, 2:].flatten(0, 1)
    # What completes a step of the stride is never used.
    codes = torch.full(
        (padded.shape[0], geometry.stored_height, geometry.stored_width, geometry.channels),
        77,
        dtype=torch.int8,
    )
    codes[:, : padded.shape[1], : padded.shape[2]] = padded
    plan = hopper_plan.HopperPlan(64, 2, 8, 64, stages=2, num_warps=4)
    expected = reference.convolve(plain, qdata, geometry).permute(0, 4, 1, 2, 3)
    assert torch.equal(emulate(codes, qdata, geometry, plan), expected)
