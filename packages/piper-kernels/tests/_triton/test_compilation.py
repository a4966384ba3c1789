"""Every kernel compiles to machine code for every target, without a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import machine_code

from piper_kernels._triton import products
from piper_kernels.weights.convrot.int8 import _product_kernels, _row_kernels
from piper_kernels.weights.nvfp4 import _quantize_kernels, _update_kernels

NATIVE_FP4 = ("sm_100", "sm_120")
POINTERS = {
    "amax_bits": "*i32",
    "bytes": "*u8",
    "e2m1": "*fp32",
    "global_scale": "*fp32",
    "left": "*bf16",
    "qdata": "*i8",
    "qdata_words": "*i32",
    "right": "*fp32",
    "scale": "*fp32",
    "source": "*bf16",
    "words": "*i32",
    "out": "*fp32",
    "alpha": "fp32",
    "beta": "fp32",
    "seed": "i64",
    "row_stride": "i64",
    "left_row_stride": "i64",
    "left_column_stride": "i64",
    "right_row_stride": "i64",
}


@pytest.fixture(scope="module")
def primitives(load_module):
    return load_module(Path(__file__).with_name("primitive_kernels.py"))


@pytest.fixture(params=machine_code.SUPPORTED)
def target(request, own_compiler_cache):
    return request.param


def build(kernel, target, constants, options=None, **types):
    return machine_code.build(kernel, target, constants, POINTERS | types, options=options)


def precision(target):
    return "tf32x3" if target.startswith("sm_") else "ieee"


def block(target, full, small):
    """Take the block sizes of the launchers on the measured target, small ones elsewhere."""
    return full if target == "sm_90" else small


def test_primitives(target, primitives):
    rows = {"ROWS": 1, "COLS": 1024}
    build(primitives.rotate_kernel, target, rows | {"GROUP": 256}, source="*fp32")
    build(primitives.quantize_kernel, target, rows | {"STOCHASTIC": True}, source="*fp32")
    for native, stochastic in ((False, True), (target in NATIVE_FP4, False)):
        flags = {"TWO_LEVEL": True, "HIGH_FIRST": False, "NATIVE": native, "STOCHASTIC": stochastic}
        compiled = build(
            primitives.nvfp4_kernel,
            target,
            flags | {"BLOCKS": 32},
            source="*fp32",
            qdata="*u8",
            scale="*u8",
        )
        assert ("e2m1x2" in compiled.asm.get("ptx", "")) == native


def test_int8_rows(target):
    chunks = {"ROWS": 1, "SIZE": block(target, 2048, 256), "COUNT": 3}
    wide = {"SIZE": block(target, 4096, 512)}
    for stochastic in block(target, (False, True), (True,)):
        flags = {"GROUP": 256, "READ_BASE": True, "STOCHASTIC": stochastic}
        build(_row_kernels.fused_rows_kernel, target, flags | chunks)
        build(_row_kernels.wide_rows_kernel, target, flags | wide, {"num_warps": 8})


def test_int8_products(target):
    constants = {
        "ROWS": block(target, 64, 32),
        "COLUMNS": block(target, 128, 32),
        "DEPTH": block(target, 32, 16),
        "PRECISION": precision(target),
        "READ_BASE": True,
    }
    for encode in block(target, (False, True), (True,)):
        flags = {"STOCHASTIC": encode, "ENCODE": encode}
        build(_product_kernels.product_kernel, target, constants | flags, {"num_warps": 8})
    build(_product_kernels.store_scales_kernel, target, {"SIZE": 1024})
    build(products.rotate_rows_kernel, target, {"GROUP": 256, "SIZE": block(target, 1024, 256)})


def test_nvfp4_updates(target):
    native = target in NATIVE_FP4
    dense = {"GROUP": 64, "ROWS": 8, "COLUMNS": block(target, 256, 64)}
    product = {
        "ROWS": block(target, 64, 32),
        "COLUMNS": block(target, 64, 32),
        "DEPTH": block(target, 32, 16),
        "PRECISION": precision(target),
        "READ_BASE": True,
    }
    layout = {"TWO_LEVEL": True, "SWIZZLED": True, "HIGH_FIRST": False, "NATIVE": native}
    storage = {"qdata": "*u8", "scale": "*u8"}
    for pack, stochastic in block(
        target, ((False, False), (True, False), (True, True)), ((True, not native),)
    ):
        flags = layout | {"PACK": pack, "STOCHASTIC": stochastic}
        compiled = build(_update_kernels.dense_kernel, target, flags | dense, **storage)
        build(_update_kernels.product_kernel, target, flags | product, **storage)
        assert ("e2m1x2" in compiled.asm.get("ptx", "")) == native
    build(_update_kernels.store_global_scale_kernel, target, {})


def test_nvfp4_quantization(target):
    native = target in NATIVE_FP4
    layout = {"TWO_LEVEL": True, "SWIZZLED": True, "NATIVE": native}
    for group, experts in block(target, ((0, True), (64, False), (256, False)), ((64, False),)):
        tile = {"GROUP": group, "ROWS": 8, "COLUMNS": block(target, 256, 64)}
        build(_quantize_kernels.amax_kernel, target, tile | {"ROWS": 16})
        flags = layout | {"EXPERTS": experts}
        compiled = build(_quantize_kernels.pack_kernel, target, flags | tile, scale="*u8")
        assert ("e2m1x2" in compiled.asm.get("ptx", "")) == native
