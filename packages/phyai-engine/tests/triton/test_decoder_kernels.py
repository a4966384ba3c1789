"""The fused decoder kernels: numerics in the interpreter or on a GPU, machine code for all."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.compiler import ASTSource

from phyai.triton import persistent_entry, segments, skinny, small_gemm

from .checks import WHERE
from .targets import TARGETS

CHECKS = Path(__file__).with_name("decoder_checks.py")
BLOCKS = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "WIDE": False}
KERNELS = {
    "gate_up": (skinny._consume_kernel, {"FORM": 1, "TILES": 32, **BLOCKS}),
    "qkv": (skinny._consume_kernel, {"FORM": 2, "TILES": 32, **BLOCKS}),
    "residual": (skinny._produce_kernel, {"SPLITS": 4, **BLOCKS}),
    "enter": (skinny._enter_kernel, {"BLOCK": 1024}),
    "persistent entry": (
        persistent_entry.enter_kernel, {"BLOCK": 1024, "PARTS": 32, "COUNTERS": 64},
    ),
    "attend": (
        segments._attend_kernel,
        {
            "GROUP": 8, "KV_HEADS": 1, "DIM": 256, "CHUNK": 64, "SPLITS": 16,
            "BLOCK_M": 64, "BLOCK_N": 64, "WIDE": False,
        },
    ),
    "small": (small_gemm._small_kernel, {"HAS_BIAS": True, "BLOCK_N": 8, "BLOCK_K": 1024}),
    "merge": (
        segments._merge_kernel, {"DIM": 256, "SPLITS": 16, "ROWS": 1},
    ),
}  # fmt: skip
FP32 = ("squares", "constant", "rotation", "gate", "scale", "lse", "eps")
INT32 = ("counters", "segments")
BF16 = ("x", "weight", "out", "keys", "values", "residual", "scaled", "query")


def signature(kernel, constants, name):
    types = dict.fromkeys(kernel.arg_names, "i32")
    for kind, names in (("*fp32", FP32), ("*i32", INT32), ("*bf16", BF16)):
        types.update({key: kind for key in names if key in types})
    types["partial"] = "*fp32" if name == "residual" else "*bf16"
    types["eps"] = "fp32"
    if name == "small":
        types |= dict.fromkeys(("x", "weight", "bias", "out"), "*fp32")
    if name == "attend":
        types["scale"] = "fp32"
    return {key: "constexpr" if key in constants else types[key] for key in kernel.arg_names}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name, target):
    kernel, constants = KERNELS[name][0], dict(KERNELS[name][1])
    narrow = target.startswith(("gfx", "sm_120", "sm_89")) and "BLOCK_K" in constants
    if narrow:  # a quarter of the shared memory
        constants["BLOCK_K"] = 64
    if name == "attend" and target != "sm_90":  # the full width takes ten seconds to compile
        constants |= {"DIM": 64, "BLOCK_N": 16 if target.startswith("gfx") else 32}
    options = {"num_warps": 4, "num_stages": 2 if target == "sm_90" else 1}
    source = ASTSource(kernel, signature(kernel, constants, name), constexprs=constants)
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    assert compiled.asm


@pytest.mark.parametrize("where", WHERE)
def test_numerics(where, run_kernel_checks):
    run_kernel_checks(CHECKS, *where)
