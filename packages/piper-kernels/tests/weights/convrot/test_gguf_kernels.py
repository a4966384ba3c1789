"""The GGUF kernels: numerics in the interpreter or on a GPU, machine code for every target."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import machine_code

from piper_kernels.gguf import GGUFQuantizationType
from piper_kernels.weights.convrot.int8 import gguf_triton as int8
from piper_kernels.weights.convrot.nvfp4 import gguf_triton as nvfp4

HERE = Path(__file__).parent
SCRIPTS = [HERE / "int8" / "gguf_kernels.py", HERE / "nvfp4" / "gguf_nvfp4_kernels.py"]
POINTERS = {
    "data": "*u8",
    "out": "*fp32",
    "qdata": "*u8",
    "scale": "*u8",
    "maxima": "*fp32",
    "amax_bits": "*i32",
    "per_tensor_scale": "*fp32",
}
Q4_K = int(GGUFQuantizationType.Q4_K)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_numerics_in_the_interpreter(script, run_kernel_checks):
    run_kernel_checks(script)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_numerics_on_the_gpu(script, run_kernel_checks):
    run_kernel_checks(script, "cuda")


@pytest.fixture(params=machine_code.SUPPORTED)
def target(request, own_compiler_cache):
    return request.param


def build(kernel, target, constants, **types):
    types = POINTERS | types
    aligned = machine_code.pointers(types)
    return machine_code.build(kernel, target, constants, types, aligned=aligned)


def test_every_type_compiles(target, load_module):
    module = load_module(SCRIPTS[0])
    bits = sum(1 << kind for kind in GGUFQuantizationType)
    build(module.decode_every_type_kernel, target, {"UNITS": 16, "TYPE_BITS": bits})


def test_int8_conversion_compiles(target):
    constants = {"TYPE": Q4_K, "GROUP": 256}
    types = {"words": "*i32", "scale": "*fp32"}
    fused = {"ROWS": 1, "SIZE": 256, "COUNT": 3}
    build(int8.convert_rows_kernel, target, constants | fused, **types)
    build(int8.tile_maxima_kernel, target, constants | {"TILE": 256})
    build(int8.convert_tiles_kernel, target, constants | {"TILE": 256, "TILES": 64}, **types)


def test_nvfp4_conversion_compiles(target):
    if not target.startswith("sm_"):
        pytest.skip("NVFP4 conversion is limited to CUDA")
    constants = {"TYPE": Q4_K, "GROUP": 256, "ROWS": 2, "COLS": 256}
    build(nvfp4.amax_kernel, target, constants)
    for native in (False, target in ("sm_100", "sm_120")):
        flags = {
            "TWO_LEVEL": True,
            "COMPUTED": True,
            "SWIZZLED": True,
            "HIGH_FIRST": False,
            "NATIVE": native,
        }
        compiled = build(nvfp4.pack_kernel, target, constants | flags, qdata_words="*i32")
        assert ("e2m1x2" in compiled.asm["ptx"]) == native
