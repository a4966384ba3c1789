"""The kernels of convolutions compile to machine code for their targets, without a GPU."""

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import machine_code

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.conv3d.convrot.int8 import _plan
from piper_kernels.conv3d.convrot.int8._kernels import convolution, preparation, statistics
from piper_kernels.conv3d.convrot.int8._nvidia import hopper_plan

SHARED_MEMORY = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
FLOATS = ("input_scale", "weight_scale", "mean", "deviation", "norm_weight", "norm_bias")
TYPES = {
    **dict.fromkeys((*FLOATS, "partials"), "*fp32"),
    **dict.fromkeys(("source", "bias", "residual", "out"), "*fp16"),
    **dict.fromkeys(("codes", "weight"), "*i8"),
    "words": "*i32",
    "epsilon": "fp32",
}
STRIDES = {"STRIDE_T": 1, "STRIDE_H": 2, "STRIDE_W": 2}


pytestmark = pytest.mark.usefixtures("own_compiler_cache")


def build(kernel, name, constants, options=None):
    strides = [n for n in kernel.arg_names if n.endswith("_stride") and n != "bias_stride"]
    types = TYPES | dict.fromkeys(strides, "i64")
    aligned = machine_code.pointers(types)
    compiled = machine_code.build(kernel, name, constants, types, aligned=aligned, options=options)
    return check_shared(compiled, name)


def check_shared(compiled, name):
    if name in SHARED_MEMORY:
        assert compiled.metadata.shared <= SHARED_MEMORY[name] * 1024
    return compiled


@pytest.mark.parametrize("name", machine_code.SUPPORTED)
def test_product(name, tmp_path):
    """The schedules of both widths over all targets, with and without bias and residual."""
    narrow = name in ("sm_80", "gfx1200")
    target = AcceleratorTarget("cuda" if name in SHARED_MEMORY else "hip", name)
    plan = _plan.select_plan(target, 64 if narrow else 128, 128)
    flags = {"HAS_BIAS": not narrow, "HAS_RESIDUAL": narrow, "WIDE": name == "sm_90"}
    tile = {"OUTPUTS": plan.outputs, "VOXELS": plan.voxels, "DEPTH": plan.depth, "CHANNELS": 128}
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    options["enable_fp_fusion"] = False
    compiled = build(convolution.conv3d_kernel, name, STRIDES | tile | flags, options)
    if name in SHARED_MEMORY:
        instruction = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma|mma.sync"}
        assert re.search(instruction.get(name, "mma.sync"), compiled.asm["ptx"])
        # Triton 3.6 keeps a few addresses of the epilogue on the stack.
        assert name == "sm_90" or machine_code.stack_bytes(compiled, tmp_path) <= 512
    else:
        assert "wmma_i32_16x16" in compiled.asm["amdgcn"]


@pytest.mark.parametrize("name", ["sm_89", "gfx1201"])
def test_preparation(name):
    last = name == "sm_89"
    tile = _plan.plan_voxels(64)
    constants = {
        "CHANNELS": 128, "VOXELS": tile.voxels, "SIZE": tile.columns, "GROUP": 64,
        "NORM_CHANNELS": 0 if last else 4, "BEFORE": 1, "FLAT": last, "CHANNELS_LAST": last,
    }  # fmt: skip
    build(preparation.prepare_voxels_kernel, name, constants, {"num_warps": tile.num_warps})


@pytest.mark.parametrize("name", ["sm_120", "gfx1200"])
def test_statistics(name):
    constants = {"CHANNELS": 4, "PIXELS": 1024, "TILES": 8, "FLAT": True}
    build(statistics.statistics_kernel, name, constants)
    constants = {"CHANNELS": 4, "CHUNK_PIXELS": 8192, "CHUNKS": 32}
    build(statistics.finish_statistics_kernel, name, constants, {"num_warps": 1})


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_hopper_preparation(last, tmp_path):
    hopper = pytest.importorskip("piper_kernels.conv3d.convrot.int8._nvidia.hopper_preparation")
    kernel = hopper.hopper_prepare_kernel
    plan = hopper.plan_voxels(256 if last else 64, 256)
    constants = {
        "CHANNELS": 256, "VOXELS": plan.voxels, "BLOCKS": plan.blocks,
        "GROUP": 256 if last else 64, "NORM_CHANNELS": 0 if last else 8, "BEFORE": 1, "AFTER": 1,
        "FLAT": True, "LAST": last, "LOAD": hopper.load_layout(plan, last),
        "SHARED": hopper.shared_layout(), "STORE": hopper.store_layout(plan),
        "channel_stride" if last else "column_stride": 1,
    }  # fmt: skip
    strides = [name for name in kernel.arg_names if name.endswith("_stride")]
    types = TYPES | dict.fromkeys(strides, "i64")
    aligned = ["source", "words", "height", "width", *strides]
    options = {"num_warps": plan.num_warps}
    compiled = machine_code.build(
        kernel, "sm_90", constants, types, aligned=aligned, options=options, gluon=True
    )
    ptx = compiled.asm["ptx"]
    # Fragments are loaded and stored as they are in memory; only a transposition is shared.
    assert re.search(r"ld\.global(\.\w+)*\.v4", ptx)
    assert re.search(r"st\.global(\.\w+)*\.v4", ptx)
    assert "mma.sync.aligned.m16n8k16" in ptx
    assert "shfl" not in ptx
    assert compiled.metadata.shared == (0 if last else 3 * 64 * 64 * 2)
    assert machine_code.stack_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize(
    ("tile", "sent"),
    [(hopper_plan.LARGE, True), (hopper_plan.LARGE, False), (hopper_plan.THIN, False)],
    ids=["LARGE sent", "LARGE", "THIN"],
)
def test_hopper_product(tile, sent, tmp_path):
    hopper = pytest.importorskip("piper_kernels.conv3d.convrot.int8._nvidia.hopper")
    from piper_kernels.conv3d.convrot.int8._nvidia import hopper_kernel

    kernel = hopper_kernel.hopper_conv3d_kernel
    large = tile is hopper_plan.LARGE
    plan = hopper_plan.HopperPlan(
        tile.outputs, tile.voxels // 32, 32, 128 if large else 64, tile.stages, tile.num_warps,
        tile.programs_per_sm, tile.buffers,
    )  # fmt: skip
    blocks = {"code_desc": hopper.code_block(plan), "weight_desc": [plan.outputs, plan.depth]}
    constants = STRIDES | {
        "CHANNELS": plan.depth, "STAGES": plan.stages, "HAS_BIAS": True,
        "HAS_RESIDUAL": not sent, "BUFFERS": plan.buffers if sent else 0,
        "WIDE": not large, "COPY_REGISTERS": hopper.COPY_REGISTERS,
        "STORE": hopper.store_layout(plan.outputs, plan.voxels, plan.num_warps),
    }  # fmt: skip
    if not large:  # sizes of one are constants
        constants |= dict.fromkeys(("samples", "out_frames", "out_height", "out_width"), 1)
    types = TYPES | {
        name: f"tensordesc<i8{block},{hopper.tile_layout(*block)!r}>"
        for name, block in blocks.items()
    }
    block = hopper.out_block(plan)
    types["out_desc"] = f"tensordesc<fp16{block},{hopper.out_layout(plan)!r}>"
    aligned = ("out", "residual", "bias", "weight_scale", "out_width", "out_height")
    options = {"num_warps": plan.num_warps, "maxnreg": hopper.max_registers(plan)}
    options["enable_fp_fusion"] = False
    compiled = machine_code.build(
        kernel, "sm_90", constants, types, aligned=aligned, options=options, gluon=True
    )
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n" in ptx
    assert "cp.async.bulk.tensor.5d" in ptx
    if sent:
        assert "cp.async.bulk.tensor.5d.global.shared" in ptx
        assert "stmatrix" in ptx
    assert "st.global.v4" in ptx or not large or sent
    assert machine_code.stack_bytes(compiled, tmp_path) == 0
    assert plan.programs_per_sm * (compiled.metadata.shared + 1024) <= 228 * 1024
