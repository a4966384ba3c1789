"""The linear kernels: in the interpreter, as machine code for every target, and on a GPU."""

import re
from pathlib import Path

import pytest
import torch
from process_state import no_synchronization

pytest.importorskip("triton", reason="Triton is not installed")

import machine_code
import triton.language as tl
from torch.nn import functional
from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.linear.nvfp4 import _operand_kernels, _product_kernels
from piper_kernels.linear.nvfp4._plan import plan_product
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor

CHECKS = Path(__file__).with_name("kernel_checks.py")
POINTERS = {
    "amax_bits": "*i32",
    "bias": "*bf16",
    "given": "*fp32",
    "input_level": "*fp32",
    "level": "*fp32",
    "out": "*bf16",
    "partials": "*fp32",
    "qdata": "*u8",
    "qdata_words": "*i32",
    "scale": "*u8",
    "source": "*bf16",
    "weight_level": "*fp32",
    "words": "*i16",
    "factor": "fp32",
    "input_factor": "fp32",
}
ALIGNED = (
    "source", "words", "scale", "out", "features", "width", "split_depth", "word_row_stride",
    "source_row_stride", "out_row_stride", "qdata", "qdata_words", "row_stride",
)  # fmt: skip
NUMERICS = {"LEVEL_X": True, "LEVEL_W": True, "BIAS": True}
DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


def test_numerics_in_the_interpreter(run_kernel_checks):
    run_kernel_checks(CHECKS)


@pytest.fixture(params=machine_code.TARGETS)
def target(request, own_compiler_cache):
    return request.param


def build(kernel, target, constants, options=None, **types):
    types = POINTERS | types
    return machine_code.build(kernel, target, constants, types, aligned=ALIGNED, options=options)


def build_product(target, plan, dtype, **flags):
    on_cuda = target.startswith("sm_")
    constants = NUMERICS | {
        "ROWS": plan.rows,
        "OUTPUTS": plan.outputs,
        "DEPTH": plan.depth,
        "GROUP": plan.group,
        "DTYPE": DTYPES[dtype],
        "PRECISION": "tf32x3" if on_cuda and dtype == "fp32" else "ieee",
        "ARRANGED": plan.arrangement > 0,
        "EVEN": True,
        "PARTIAL": False,
        "SWIZZLED": True,
        "HIGH_FIRST": False,
        "NATIVE": on_cuda and dtype != "fp32",
        "FP8": on_cuda and target != "sm_80",
    }
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    return build(
        _product_kernels.product_kernel,
        target,
        constants | flags,
        options,
        source=f"*{dtype}",
        out="*fp32" if flags.get("PARTIAL") else f"*{dtype}",
    )


def plan_for(target, rows, operand_bytes):
    backend = machine_code.TARGETS[target].backend
    accelerator = AcceleratorTarget(backend, target)
    return plan_product(accelerator, 132, rows, 8192, 8192, operand_bytes)


def test_products(target):
    compiled = build_product(target, plan_for(target, 16, 2), "bf16", PARTIAL=True)
    if target.startswith("sm_"):
        # Codes are decoded two at a time and never stored to shared memory as numbers.
        assert "fma.rn.bf16x2" in compiled.asm["ptx"]
    if target == "sm_90":
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert "dot_op<{opIdx = 0" in compiled.asm["ttgir"]
        compiled = build_product(target, plan_for(target, 256, 2), "bf16")
        assert compiled.metadata.shared <= 227 * 1024 // 2  # two programs a processor
        build_product(target, plan_for(target, 256, 2), "fp16", EVEN=False, HIGH_FIRST=True)
        build_product(target, plan_for(target, 256, 4), "fp32")
        build_product(target, plan_for(target, 64, 4), "fp32", SWIZZLED=False)
    elif target == "sm_80":
        build_product(target, plan_for(target, 256, 2), "fp16")
    flags = NUMERICS | {"ROWS": 4, "OUTPUTS": 512, "DTYPE": tl.bfloat16, "NATIVE": False}
    flags |= {"SPLITS": 4, "DEPENDENT": target == "sm_90"}
    build(_product_kernels.finish_kernel, target, flags)


def test_operands(target):
    tile = {"ROWS": 8, "COLUMNS": 256, "GROUP": 64}
    native = target in ("sm_100", "sm_120")
    activation = {"GELU": False, "SWIGLU": True}
    for flags in ({},) if target != "sm_90" else ({}, {"GELU": True, "SWIGLU": False}):
        build(_operand_kernels.input_amax_kernel, target, tile | activation | flags)
        encode = {"DYNAMIC": True, "HIGH_FIRST": False, "NATIVE": native}
        compiled = build(
            _operand_kernels.encode_input_kernel, target, tile | activation | encode | flags
        )
        assert ("e2m1x2" in compiled.asm.get("ptx", "")) == native
    arranged = tile | {"ARRANGEMENT": 64}
    build(_operand_kernels.quantized_operand_kernel, target, arranged | {"DYNAMIC": True})
    for arrangement in (64, 256) if target == "sm_90" else (64,):
        arranged["ARRANGEMENT"] = arrangement
        leads = {"LEADS": arrangement == 256}
        build(_operand_kernels.dense_operand_kernel, target, arranged | leads)
    rotated = {"ROWS": 1, "SIZE": 2048, "LEADS": target == "sm_90"}
    build(_operand_kernels.rotated_operand_kernel, target, rotated, {"num_warps": 1})
    del arranged["GROUP"]
    layout = {"SWIZZLED": True, "HIGH_FIRST": False}
    build(_operand_kernels.packed_operand_kernel, target, arranged | layout)
    decoded = {"SWIZZLED": False, "HIGH_FIRST": True, "ARRANGEMENT": 0}
    build(_operand_kernels.packed_operand_kernel, target, arranged | decoded)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("check", re.findall(r"^def (check_\w+)", CHECKS.read_text(), re.M))
    def test_numerics(self, check, run_kernel_checks):
        run_kernel_checks(CHECKS, "cuda", check)

    @pytest.mark.parametrize("rows", [1, 16, 65, 1000])
    @pytest.mark.parametrize("dynamic", [None, False, True])
    def test_is_capturable_and_never_synchronizes(self, rows, dynamic):
        weight = ConvRotNVFP4Tensor.from_hp(
            torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16),
            group_size=64,
            compute_per_tensor_scale=True,
            is_swizzled_scales=True,
        )
        if dynamic is not None:
            weight.act_quant_kwargs = QuantizeTensorToNVFP4Kwargs(
                is_swizzled_scales=True, use_dynamic_per_tensor_scale=dynamic
            )
        x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
        with torch.inference_mode():
            functional.linear(x, weight)
            with no_synchronization():
                expected = functional.linear(x, weight)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = functional.linear(x, weight)
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)

    def test_offsets_beyond_int32(self, large_device_memory):
        rows, outputs = 80_000, 28_672
        weight = ConvRotNVFP4Tensor.from_hp(
            torch.randn(outputs, 256, device="cuda", dtype=torch.bfloat16),
            group_size=64,
            is_swizzled_scales=True,
        )
        x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
        with torch.inference_mode():
            tail = functional.linear(x, weight)[-200:].double()
        expected = x[-200:].double() @ weight.dequantize(torch.float32).double().t()
        # The rotated input and the result are rounded to bf16, each by half a unit at most.
        eps = torch.finfo(torch.bfloat16).eps
        assert (tail - expected).norm() < eps * expected.norm()
        assert (tail - expected).abs().max() < 4 * eps * expected.abs().max()
