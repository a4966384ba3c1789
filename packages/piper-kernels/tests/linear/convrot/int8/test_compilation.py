"""Every kernel and plan compiles to machine code for its targets, without a GPU."""

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import machine_code

from piper_kernels.linear.convrot.int8._amd import plan as amd
from piper_kernels.linear.convrot.int8._kernels import matmul, mean, preparation, rows
from piper_kernels.linear.convrot.int8._nvidia import plan as nvidia

PLANS = {
    "sm_80": [nvidia.SM8X_SMALL, nvidia.SM8X_MEDIUM, nvidia.SM8X_LARGE, nvidia.SM8X_NARROW],
    "sm_89": [nvidia.SM8X_MEDIUM, nvidia.SM8X_SMALL, nvidia.SM8X_LARGE],
    "sm_90": [nvidia.SMALL, nvidia.MEDIUM, nvidia.BASE],
    "sm_100": [nvidia.SMALL, nvidia.MEDIUM, nvidia.SM100_LARGE],
    "sm_120": [nvidia.SMALL, nvidia.MEDIUM, nvidia.BASE],
    "gfx942": [amd.SMALL],
    "gfx1200": [amd.SMALL],
    "gfx1201": [amd.SMALL, amd.LARGE],
}
SHARED_MEMORY = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
INT64 = {"x_row_stride", "out_row_stride", "row_stride"}
ALIGNED = (
    "x", "w", "second_w", "x_row_stride", "depth", "source", "row_stride", "features", "out",
    "out_row_stride", "residual", "x_stride", "residual_stride", "head_stride",
)  # fmt: skip
POINTERS = {
    "x": "*i8", "w": "*i8", "second_w": "*i8", "qdata": "*i8", "x_scale": "*fp32",
    "w_scale": "*fp32", "second_w_scale": "*fp32", "scale": "*fp32", "static_scale": "*fp32",
    "bias": "*bf16", "second_bias": "*fp32", "out": "*bf16", "parts": "*i32", "words": "*i32",
    "source": "*bf16", "block_lengths": "*i32",
}  # fmt: skip


@pytest.fixture(params=machine_code.TARGETS)
def target(request, own_compiler_cache):
    return request.param


def build(kernel, target, constants, options=None, **types):
    types = POINTERS | dict.fromkeys(INT64, "i64") | types
    return machine_code.build(kernel, target, constants, types, aligned=ALIGNED, options=options)


def test_matmul(target, tmp_path):
    for index, plan in enumerate(PLANS[target]):
        paired = index == 0
        split = 2 if index == 1 else plan.split_k
        flags = {"PAIRED": paired, "HAS_BIAS": paired, "HAS_SECOND_BIAS": paired}
        constants = {
            "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k,
            "GROUP_M": plan.group_m, "SPLIT_K": split, "EVEN_K": not paired,
        }  # fmt: skip
        options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
        compiled = build(
            matmul.matmul_kernel,
            target,
            constants | flags,
            options | {"enable_fp_fusion": False},
            out="*i32" if split > 1 else "*bf16",
        )
        if target in SHARED_MEMORY:
            assert compiled.metadata.shared <= SHARED_MEMORY[target] * 1024
            if split == plan.split_k:
                assert machine_code.stack_bytes(compiled, tmp_path) == 0, f"{plan} spills registers"
            mma = {"sm_90": "wgmma" if plan.block_m >= 64 else "mma.sync"}.get(target)
            assert mma is None or mma in compiled.asm["ptx"]


def test_sum_parts(target):
    constants = {"BLOCK_M": 4, "BLOCK_N": 256, "SPLIT_K": 4}
    flags = {"PAIRED": True, "HAS_BIAS": True, "HAS_SECOND_BIAS": False}
    build(matmul.sum_parts_kernel, target, constants | flags)


@pytest.mark.parametrize("activation", [None, "gelu_tanh", "swiglu", "silu_and_mul"])
def test_preparation(target, activation):
    full = target == "sm_90"
    constants = {"GROUP": 256 if full else 64, "ACTIVATION": activation, "STATIC": not activation}
    chunks = {"ROWS": 1, "SIZE": 2048 if full else 256, "COUNT": 3 if activation else 1}
    build(preparation.prepare_rows_kernel, target, constants | chunks)
    if activation not in ("gelu_tanh", "silu_and_mul"):
        size = {"SIZE": 4096 if full else 512}
        build(preparation.prepare_wide_rows_kernel, target, constants | size, {"num_warps": 8})


def test_rows(target, tmp_path):
    constants = {"GROUP": 64, "ROWS": 1, "SIZE": 4096 if target == "sm_90" else 256}
    types = {"x": "*bf16", "residual": "*bf16", "weight": "*fp32", "total": "*bf16", "eps": "fp32"}
    norm = {"ADD": True, "GEMMA": False}
    for kernel, more in ((rows.norm_rows_kernel, norm), (rows.head_rows_kernel, {"WIDTH": 128})):
        compiled = build(kernel, target, constants | more, **types)
        if target == "sm_90":
            assert machine_code.stack_bytes(compiled, tmp_path) == 0
            assert "ld.global.v4" in compiled.asm["ptx"]


def test_mean(target):
    constants = {"ROWS": 32, "COLUMNS": 128, "MASKED": True}
    build(mean.sum_rows_kernel, target, constants, out="*fp32", parts="i32")


def test_hopper_matmul(tmp_path, monkeypatch):
    hopper = pytest.importorskip("piper_kernels.linear.convrot.int8._nvidia.hopper")
    from piper_kernels.linear.convrot.int8._nvidia import hopper_kernel, hopper_plan

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = hopper_kernel.hopper_matmul_kernel
    plans = [*hopper_plan.PLANS, replace(hopper_plan.THIN, split_k=4)]
    for index, plan in enumerate(plans):
        paired = index % 2 == 0
        size = 4 if plan in (hopper_plan.LARGE, hopper_plan.SQUARE) else 2
        constants = {
            "STAGES": plan.stages, "GROUP_M": plan.group_m, "SPLIT_K": plan.split_k,
            "STORE": hopper.store_layout(plan.block_m, plan.block_n, plan.num_warps, size),
            "PAIRED": paired, "HAS_BIAS": not paired, "HAS_SECOND_BIAS": paired,
            "COPY_REGISTERS": hopper.COPY_REGISTERS,
        }  # fmt: skip
        blocks = {"x_desc": [plan.block_m, plan.block_k], "w_desc": [plan.block_n, plan.block_k]}
        blocks["second_w_desc"] = blocks["w_desc"]
        types = POINTERS | dict.fromkeys(INT64, "i64")
        types |= {n: f"tensordesc<i8{b},{hopper.operand_layout(*b)!r}>" for n, b in blocks.items()}
        types["out"] = "*i32" if plan.split_k > 1 else {2: "*bf16", 4: "*fp32"}[size]
        aligned = ("out", "columns", "out_row_stride")
        options = {
            "num_warps": plan.num_warps, "maxnreg": hopper.max_registers(plan),
            "enable_fp_fusion": False,
        }  # fmt: skip
        compiled = machine_code.build(
            kernel, "sm_90", constants, types, aligned=aligned, options=options, gluon=True
        )
        assert "wgmma.mma_async.sync.aligned.m64n" in compiled.asm["ptx"]
        # One kibibyte of a multiprocessor's shared memory is reserved for each program.
        assert plan.programs_per_sm * (compiled.metadata.shared + 1024) <= 228 * 1024
        if plan.split_k == 1:
            assert "st.global.v4" in compiled.asm["ptx"]
