"""Preparation compiles to machine code without a GPU, with the instructions it is meant to use."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import machine_code

from piper_kernels.attention._preparation._mean_kernels import finish_kernel, partial_kernel
from piper_kernels.attention._preparation._quantize_kernels import quantize_kernel
from piper_kernels.attention._preparation._repack_kernels import repack_kernel
from piper_kernels.attention._preparation._route_kernels import select_kernel, table_kernel
from piper_kernels.attention._preparation._summary_kernels import summary_kernel

POINTERS = {
    **dict.fromkeys(("query", "key", "value", "source"), "*bf16"),
    **dict.fromkeys(("lengths", "value_words", "value_sum", "table"), "*i32"),
    **dict.fromkeys(("query_codes", "key_codes"), "*i8"),
    **dict.fromkeys(("codes", "permuted"), "*i16"),
    **dict.fromkeys(("query_scale", "key_scale", "rotated_mean", "scores", "log_max"), "*fp32"),
    **dict.fromkeys(("value_multiplier", "value_logs", "value_numbers", "partials"), "*fp32"),
    **dict.fromkeys(("means", "rotated", "first", "second", "multiplier"), "*fp32"),
    "routes": "*u16",
    "query_factor": "fp32",
}


pytestmark = pytest.mark.usefixtures("own_compiler_cache")


def build(kernel, target, constants, options=None, **types):
    strides = {name: "i64" for name in kernel.arg_names if name.endswith("_stride")}
    types = strides | POINTERS | types
    return machine_code.build(kernel, target, constants, types, options=options)


def quantize(target, values, pointer="*bf16", options=None):
    constants = {
        "D": 64,
        "QUERY_GROUPS": (32, 1, 1),
        "KEY_GROUPS": (8, 4, 2),
        "VALUES": values,
        "PERMUTED": True,
        "SUMS": values < 3,
        "MASKED": False,
        "WIDE": False,
        "HAS_QUERIES": True,
        "HAS_KEYS": True,
        "HAS_VALUES": True,
        "STAGES": 1,
    }
    types = dict.fromkeys(("query", "key", "value"), pointer)
    return build(quantize_kernel, target, constants, options, **types)


@pytest.mark.parametrize("target", machine_code.SUPPORTED)
def test_small_kernels(target):
    flags = {"D": 64, "MASKED": True, "VALUE_SCALES": True}
    build(partial_kernel, target, flags)
    build(finish_kernel, target, flags | {"CHUNKS": 16})
    build(select_kernel, target, {"COLUMNS": 64}, {"num_warps": 1})
    build(table_kernel, target, {}, first="i32")
    build(repack_kernel, target, {"D": 64, "PER_TILE": False})
    constants = {"D": 64, "IS_QUERY": False, "SUMMARY": 1, "MASKED": True, "ROWS": 8}
    build(summary_kernel, target, constants, {"num_warps": 1})


@pytest.mark.parametrize(
    ("target", "instruction"),
    [("sm_80", "mma.sync"), ("sm_90", "wgmma.mma_async"), ("gfx1201", "")],
)
def test_rotations_use_matrix_units(target, instruction):
    compiled = quantize(target, values=1)
    if instruction:
        assert instruction in compiled.asm["ptx"]
    else:
        assert "v_wmma" in compiled.asm["amdgcn"]


def test_wide_rows_are_products_of_narrow_numbers():
    text = quantize("sm_90", 2, "*fp32", {"num_warps": 8}).asm["ptx"]
    assert ".f32.bf16.bf16" in text
    assert "tf32" not in text


def test_e4m3_is_converted_by_the_hardware():
    assert "e4m3x2" in quantize("sm_89", values=3).asm["ptx"]
