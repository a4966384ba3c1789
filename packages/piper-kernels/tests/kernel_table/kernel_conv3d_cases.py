"""The kernels of convolutions with the schedules that launchers choose."""

from kernel_case import ALL, KernelCase

from piper_kernels.conv3d.convrot.int8._amd import plan as amd
from piper_kernels.conv3d.convrot.int8._nvidia import hopper_plan, plan
from piper_kernels.conv3d.convrot.int8._plan import plan_statistics, plan_voxels

_PACKAGE = "conv3d.convrot.int8"
_NATIVE = ALL[:7]
_FLOATS = ("input_scale", "weight_scale", "mean", "deviation", "norm_weight", "norm_bias")
_TYPES = {
    **dict.fromkeys(_FLOATS, "*fp32"),
    **dict.fromkeys(("source", "bias", "residual", "out"), "*fp16"),
    **dict.fromkeys(("codes", "weight"), "*i8"),
    "words": "*i32",
    "partials": "*fp32",
    "epsilon": "fp32",
    "bias_stride": "i32",
}
_STRIDES = {"STRIDE_T": 1, "STRIDE_H": 2, "STRIDE_W": 2}
_EPILOGUE = {"HAS_BIAS": True, "HAS_RESIDUAL": True}


def conv3d_cases():
    """Return the cases of ConvRot INT8 convolutions."""
    yield from _statistics()
    yield from _preparations()
    plans = {
        "NARROW": (plan.NARROW, ALL[:5]),
        "SM8X": (plan.SM8X, ALL[:2]),
        "SM90": (plan.SM90, ALL[2:4]),
        "SM120": (plan.SM120, ALL[4:5]),
        "AMD NARROW": (amd.NARROW, ALL[5:7]),
        "AMD WIDE": (amd.WIDE, ALL[5:7]),
    }
    for variant, (chosen, targets) in plans.items():
        tile = {"OUTPUTS": chosen.outputs, "VOXELS": chosen.voxels, "DEPTH": chosen.depth}
        constants = _STRIDES | _EPILOGUE | tile | {"CHANNELS": 256, "WIDE": False}
        options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
        options["enable_fp_fusion"] = False
        module = f"{_PACKAGE}._kernels.convolution"
        yield KernelCase(module, "conv3d_kernel", variant, constants, _TYPES, options, targets)
    yield from _hopper_preparations()
    yield from _hopper()


def _statistics():
    module = f"{_PACKAGE}._kernels.statistics"
    for channels in (4, 32):
        pixels, tiles = plan_statistics(512 * 512, channels, 32, 132)
        constants = {"CHANNELS": channels, "PIXELS": pixels, "TILES": tiles, "FLAT": True}
        variant = f"{channels} channels"
        yield KernelCase(
            module, "statistics_kernel", variant, constants, _TYPES, targets=_NATIVE
        )  # fmt: skip
    constants = {"CHANNELS": 4, "CHUNK_PIXELS": 8192, "CHUNKS": 32}
    yield KernelCase(
        module, "finish_statistics_kernel", "", constants, _TYPES, {"num_warps": 1}, _NATIVE
    )


def _preparations():
    module = f"{_PACKAGE}._kernels.preparation"
    for group, norm, last in ((64, 0, False), (256, 8, False), (256, 0, True)):
        tile = plan_voxels(group)
        constants = {
            "CHANNELS": 256,
            "VOXELS": tile.voxels,
            "SIZE": tile.columns,
            "GROUP": group,
            "NORM_CHANNELS": norm,
            "BEFORE": 1,
            "FLAT": False,
            "CHANNELS_LAST": last,
        }
        variant = f"g{group}{' normalized' if norm else ''}{' channels last' if last else ''}"
        options = {"num_warps": tile.num_warps}
        yield KernelCase(
            module, "prepare_voxels_kernel", variant, constants, _TYPES, options, _NATIVE
        )


def _hopper_preparations():
    from piper_kernels.conv3d.convrot.int8._nvidia import hopper_preparation as hopper

    for group, norm, last in ((64, 0, False), (256, 8, False), (256, 0, True)):
        chosen = hopper.plan_voxels(group, 256)
        constants = {
            "CHANNELS": 256,
            "VOXELS": chosen.voxels,
            "BLOCKS": chosen.blocks,
            "GROUP": group,
            "NORM_CHANNELS": norm,
            "BEFORE": 1,
            "AFTER": 1,
            "FLAT": True,
            "LAST": last,
            "LOAD": hopper.load_layout(chosen, last),
            "SHARED": hopper.shared_layout(),
            "STORE": hopper.store_layout(chosen),
            "channel_stride" if last else "column_stride": 1,
        }
        variant = f"g{group}{' normalized' if norm else ''}{' channels last' if last else ''}"
        yield KernelCase(
            f"{_PACKAGE}._nvidia.hopper_preparation_kernel",
            "hopper_prepare_kernel",
            variant,
            constants,
            _TYPES,
            {"num_warps": chosen.num_warps},
            ("sm_90",),
            gluon=True,
        )


def _hopper():
    from piper_kernels.conv3d.convrot.int8._nvidia import hopper

    for name in ("LARGE", "PAIR", "NARROW", "THIN"):
        tile = getattr(hopper_plan, name)
        chosen = hopper_plan.HopperPlan(
            tile.outputs, tile.voxels // 32, 32, 128, tile.stages, tile.num_warps,
            tile.programs_per_sm, tile.buffers,
        )  # fmt: skip
        blocks = {"code_desc": hopper.code_block(chosen), "weight_desc": [tile.outputs, 128]}
        descriptors = {
            name: f"tensordesc<i8{block},{hopper.tile_layout(*block)!r}>"
            for name, block in blocks.items()
        }
        sent = hopper.out_block(chosen)
        descriptors["out_desc"] = f"tensordesc<fp16{sent},{hopper.out_layout(chosen)!r}>"
        constants = _STRIDES | {
            "HAS_BIAS": True,
            "HAS_RESIDUAL": False,
            "BUFFERS": tile.buffers,
            "CHANNELS": 256,
            "STAGES": tile.stages,
            "STORE": hopper.store_layout(tile.outputs, tile.voxels, tile.num_warps),
            "WIDE": False,
            "COPY_REGISTERS": hopper.COPY_REGISTERS,
        }  # fmt: skip
        options = {"num_warps": tile.num_warps, "maxnreg": hopper.max_registers(chosen)}
        options["enable_fp_fusion"] = False
        yield KernelCase(
            f"{_PACKAGE}._nvidia.hopper_kernel",
            "hopper_conv3d_kernel",
            name,
            constants,
            _TYPES | descriptors,
            options,
            ("sm_90",),
            gluon=True,
        )
