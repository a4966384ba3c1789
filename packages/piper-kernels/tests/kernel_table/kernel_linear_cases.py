"""The kernels of linear operators with the schedules that launchers choose."""

from kernel_case import ALL, CUDA, KernelCase, native

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.linear.convrot.int8._amd import plan as amd
from piper_kernels.linear.convrot.int8._nvidia import hopper_plan, plan
from piper_kernels.linear.convrot.int8._plan import plan_input_rows
from piper_kernels.linear.nvfp4._plan import ProductPlan, plan_product

HIP = ALL[5:]
SM8X, NEWER = ALL[:2], ALL[2:5]
_INT8 = {
    "x": "*i8",
    "w": "*i8",
    "second_w": "*i8",
    "qdata": "*i8",
    "x_scale": "*fp32",
    "w_scale": "*fp32",
    "second_w_scale": "*fp32",
    "scale": "*fp32",
    "static_scale": "*fp32",
    "bias": "*bf16",
    "second_bias": "*bf16",
    "out": "*bf16",
    "parts": "*i32",
    "words": "*i32",
    "source": "*bf16",
    "block_lengths": "*i32",
    "bias_stride": "i32",
    "second_bias_stride": "i32",
}
_EPILOGUE = {"PAIRED": False, "HAS_BIAS": True, "HAS_SECOND_BIAS": False}


def int8_cases():
    """Return the cases of ConvRot INT8 linear."""
    yield from _preparations()
    module = "linear.convrot.int8._kernels.matmul"
    plans = {
        "SMALL": (plan.SMALL, NEWER),
        "MEDIUM": (plan.MEDIUM, NEWER),
        "BASE": (plan.BASE, (NEWER[0], NEWER[2])),
        "SM100_LARGE": (plan.SM100_LARGE, NEWER[1:2]),
        "SM8X_SMALL": (plan.SM8X_SMALL, SM8X),
        "SM8X_MEDIUM": (plan.SM8X_MEDIUM, SM8X),
        "SM8X_NARROW": (plan.SM8X_NARROW, SM8X),
        "SM8X_LARGE": (plan.SM8X_LARGE, SM8X),
        "AMD SMALL": (amd.SMALL, HIP),
        "AMD LARGE": (amd.LARGE, HIP),
    }
    for variant, (chosen, targets) in plans.items():
        constants = _EPILOGUE | {
            "BLOCK_M": chosen.block_m,
            "BLOCK_N": chosen.block_n,
            "BLOCK_K": chosen.block_k,
            "GROUP_M": chosen.group_m,
            "SPLIT_K": chosen.split_k,
            "EVEN_K": True,
        }
        options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
        options["enable_fp_fusion"] = False
        yield KernelCase(module, "matmul_kernel", variant, constants, _INT8, options, targets)
    constants = _EPILOGUE | {"BLOCK_M": 4, "BLOCK_N": 256, "SPLIT_K": 4}
    options = {"enable_fp_fusion": False}
    yield KernelCase(module, "sum_parts_kernel", "", constants, _INT8, options)
    constants = {"ROWS": 32, "COLUMNS": 128, "MASKED": True}
    types = {"qdata": "*i8", "scale": "*fp32", "block_lengths": "*i32", "out": "*fp32"}
    yield KernelCase("linear.convrot.int8._kernels.mean", "sum_rows_kernel", "", constants, types)
    yield from _hopper()


def _preparations():
    module = "linear.convrot.int8._kernels.preparation"
    plan = plan_input_rows(8192)
    assert plan is not None
    chunks = {"ROWS": plan.rows, "SIZE": plan.size, "COUNT": plan.count}
    for activation in (None, "gelu_tanh", "swiglu", "silu_and_mul"):
        constants = {"GROUP": 256, "ACTIVATION": activation, "STATIC": False}
        variant = activation or "plain"
        fused, warps = constants | chunks, {"num_warps": plan.num_warps}
        yield KernelCase(module, "prepare_rows_kernel", variant, fused, _INT8, warps)
        if activation == "silu_and_mul":
            continue
        wide, warps = constants | {"SIZE": 4096}, {"num_warps": 8}
        yield KernelCase(module, "prepare_wide_rows_kernel", variant, wide, _INT8, warps)
    yield from _fused_preparations()


def _fused_preparations():
    module = "linear.convrot.int8._kernels.rows"
    norm = {"x": "*bf16", "residual": "*bf16", "weight": "*fp32", "total": "*bf16", "eps": "fp32"}
    chunks, warps = {"GROUP": 64, "ROWS": 1, "SIZE": 4096}, {"num_warps": 4}
    constants = chunks | {"ADD": True, "GEMMA": False}
    yield KernelCase(module, "norm_rows_kernel", "", constants, _INT8 | norm, warps)
    yield KernelCase(module, "head_rows_kernel", "", chunks | {"WIDTH": 128}, _INT8, warps)


def _hopper():
    from triton.experimental.gluon import language as gl

    from piper_kernels.linear.convrot.int8._nvidia import hopper

    def descriptor(rows, depth):
        layout = gl.NVMMASharedLayout.get_default_for([rows, depth], gl.int8)
        return f"tensordesc<i8{[rows, depth]},{layout!r}>"

    for name in ("LARGE", "SQUARE", "PAIR", "NARROW", "THIN"):
        chosen = getattr(hopper_plan, name)
        w_desc = descriptor(chosen.block_n, chosen.block_k)
        types = _INT8 | {
            "x_desc": descriptor(chosen.block_m, chosen.block_k),
            "w_desc": w_desc,
            "second_w_desc": w_desc,
        }
        constants = _EPILOGUE | {
            "STAGES": chosen.stages,
            "GROUP_M": chosen.group_m,
            "SPLIT_K": 1,
            "STORE": hopper.store_layout(chosen.block_m, chosen.block_n, chosen.num_warps),
            "COPY_REGISTERS": hopper.COPY_REGISTERS,
        }
        options = {"num_warps": chosen.num_warps, "maxnreg": hopper.max_registers(chosen)}
        options["enable_fp_fusion"] = False
        yield KernelCase(
            "linear.convrot.int8._nvidia.hopper_kernel",
            "hopper_matmul_kernel",
            name,
            constants,
            types,
            options,
            ("sm_90",),
            gluon=True,
        )


def _accelerator(target):
    return AcceleratorTarget("cuda" if target in CUDA else "hip", target)


def _product(target, rows):
    return plan_product(_accelerator(target), 132, rows, 8192, 8192, 2)


def nvfp4_cases():
    """Return the cases of NVFP4 linear."""
    import triton.language as tl

    types = {
        "source": "*bf16",
        "words": "*i16",
        "scale": "*u8",
        "input_level": "*fp32",
        "weight_level": "*fp32",
        "bias": "*bf16",
        "partials": "*fp32",
        "bias_stride": "i32",
        "word_row_stride": "i32",
        "source_row_stride": "i32",
        "out_row_stride": "i32",
        "input_factor": "fp32",
    }
    numerics = {"DTYPE": tl.bfloat16, "LEVEL_X": False, "LEVEL_W": True, "BIAS": True}
    numerics["NATIVE"] = lambda target: target in CUDA
    module = "linear.nvfp4._product_kernels"
    for rows in (16, 64, 200):
        schedules: dict[ProductPlan, list[str]] = {}
        for target in ALL:
            schedules.setdefault(_product(target, rows), []).append(target)
        for chosen, targets in schedules.items():
            partial = chosen.splits > 1
            constants = numerics | {
                "ROWS": chosen.rows,
                "OUTPUTS": chosen.outputs,
                "DEPTH": chosen.depth,
                "GROUP": chosen.group,
                "PRECISION": "ieee",
                "ARRANGED": chosen.arrangement > 0,
                "EVEN": True,
                "PARTIAL": partial,
                "SWIZZLED": True,
                "HIGH_FIRST": False,
                "FP8": lambda target: target in CUDA[1:],
            }
            options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
            variant = f"M={rows} {chosen.rows}x{chosen.outputs}x{chosen.depth} {targets[0]}"
            out = {"out": "*fp32" if partial else "*bf16"}
            yield KernelCase(
                module,
                "product_kernel",
                variant,
                constants,
                types | out,
                options,
                tuple(targets),
            )
    constants = numerics | {"ROWS": 4, "OUTPUTS": 512, "SPLITS": 4, "DEPENDENT": False}
    yield KernelCase(module, "finish_kernel", "", constants, types | {"out": "*bf16"})
    yield from _nvfp4_inputs()
    yield from _nvfp4_hopper()


def _nvfp4_hopper():
    from piper_kernels.linear.nvfp4._nvidia import hopper
    from piper_kernels.linear.nvfp4._nvidia.hopper_plan import select_plan

    def descriptor(rows, columns, name):
        layout = hopper.operand_layout(rows, columns, int(name.strip("bfi")))
        return f"tensordesc<{name}{[rows, columns]},{layout!r}>"

    for rows in (1, 16, 64, 128, 1024):
        plan = select_plan(rows, 8192, 8192, 132)
        constants = hopper.constants_of(plan, high_first=False, levels=(True, True), bias=True)
        options = {"num_warps": plan.num_warps}
        types = {
            "x_desc": descriptor(plan.rows, 64, "bf16"),
            "word_desc": descriptor(plan.outputs, 64, "i16"),
            "scale_desc": descriptor(16, 32, "i32"),
            "source": "*bf16",
            "input_level": "*fp32",
            "weight_level": "*fp32",
            "bias": "*bf16",
            "out": "*fp32" if plan.splits > 1 else "*bf16",
            "factor": "fp32",
            "source_row_stride": "i32",
            "bias_stride": "i32",
            "out_row_stride": "i32",
        }
        name = "stream" if plan.held_steps else "product"
        yield KernelCase(
            f"linear.nvfp4._nvidia.hopper_{name}_kernel",
            f"hopper_{name}_kernel",
            f"M={rows} {plan.rows}x{plan.outputs}",
            constants,
            types,
            options,
            ("sm_90",),
            gluon=True,
        )


def _nvfp4_inputs():
    from piper_kernels.linear.nvfp4.triton import COLUMNS, ROWS

    module = "linear.nvfp4._operand_kernels"
    types = {
        "source": "*bf16",
        "amax_bits": "*i32",
        "qdata_words": "*i32",
        "qdata": "*u8",
        "scale": "*u8",
        "given": "*fp32",
        "level": "*fp32",
        "out": "*bf16",
        "row_stride": "i32",
        "factor": "fp32",
    }
    tile = {"ROWS": ROWS, "COLUMNS": COLUMNS}
    activation = {"GELU": False, "SWIGLU": True}
    constants = tile | activation | {"GROUP": 256}
    yield KernelCase(module, "input_amax_kernel", "swiglu", constants, types)
    encode = {"DYNAMIC": True, "HIGH_FIRST": False}
    encode["NATIVE"] = native
    yield KernelCase(module, "encode_input_kernel", "swiglu", constants | encode, types)
    constants = tile | {"GROUP": 256, "ARRANGEMENT": 64}
    dense = constants | {"LEADS": False}
    yield KernelCase(module, "dense_operand_kernel", "", dense, types)
    rotated = {"ROWS": 1, "SIZE": 2048, "LEADS": False}
    yield KernelCase(module, "rotated_operand_kernel", "", rotated, types, {"num_warps": 1})
    yield KernelCase(module, "quantized_operand_kernel", "", constants | {"DYNAMIC": True}, types)
    constants = tile | {"ARRANGEMENT": 0, "SWIZZLED": True, "HIGH_FIRST": False}
    yield KernelCase(module, "packed_operand_kernel", "", constants, types)


def fusion_cases():
    """Return the cases of feed-forward networks."""
    names = ("base_ptr", "update_ptr", "ffn_ptr", "update_gate_ptr", "ffn_gate_ptr")
    types = dict.fromkeys(names, "*bf16") | {"index_ptr": "*i64"}
    constants = {"PYTHON_INDEXING": True, "BLOCK": 1024}
    yield KernelCase("fusions._ffn.triton", "gated_updates_kernel", "", constants, types)
