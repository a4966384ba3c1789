"""The GGUF kernels: numerics in the interpreter or on a GPU, machine code for every target."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from piper_kernels.gguf import GGUFQuantizationType
from piper_kernels.weights.convrot.int8 import gguf_triton as int8
from piper_kernels.weights.convrot.nvfp4 import gguf_triton as nvfp4

HERE = Path(__file__).parent
SCRIPTS = [HERE / "int8" / "gguf_kernels.py", HERE / "nvfp4" / "gguf_nvfp4_kernels.py"]
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx1200": GPUTarget("hip", "gfx1200", 32),
    "gfx1201": GPUTarget("hip", "gfx1201", 32),
}
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


@pytest.fixture(params=TARGETS)
def target(request, tmp_path, monkeypatch):
    target = TARGETS[request.param]
    backends = triton.backends.backends
    name = {"cuda": "nvidia", "hip": "amd"}[target.backend]
    if name not in backends:
        pytest.skip(f"this Triton has no {name} backend")
    if not backends[name].compiler.supports_target(target):
        pytest.skip(f"this Triton's {name} backend does not support {target}")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return target


def build(kernel, target, constants, **types):
    signature = {
        name: "constexpr" if name in constants else (POINTERS | types).get(name, "i32")
        for name in kernel.arg_names
    }
    # Device allocations are aligned, which lets the compiler vectorise.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    compiled = triton.compile(ASTSource(kernel, signature, constants, aligned), target=target)
    binary = compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]
    assert binary[:4] == b"\x7fELF"
    return compiled


def test_every_type_compiles(target):
    spec = importlib.util.spec_from_file_location("gguf_kernels", SCRIPTS[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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
    if target.backend != "cuda":
        pytest.skip("NVFP4 conversion is limited to CUDA")
    constants = {"TYPE": Q4_K, "GROUP": 256, "ROWS": 2, "COLS": 256}
    build(nvfp4.amax_kernel, target, constants)
    for native in (False, target.arch >= 100):
        flags = {
            "TWO_LEVEL": True,
            "COMPUTED": True,
            "SWIZZLED": True,
            "HIGH_FIRST": False,
            "NATIVE": native,
        }
        compiled = build(nvfp4.pack_kernel, target, constants | flags, qdata_words="*i32")
        assert ("e2m1x2" in compiled.asm["ptx"]) == native
