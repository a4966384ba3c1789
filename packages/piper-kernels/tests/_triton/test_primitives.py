import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KERNELS = Path(__file__).with_name("primitive_kernels.py")
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx1200": GPUTarget("hip", "gfx1200", 32),
    "gfx1201": GPUTarget("hip", "gfx1201", 32),
}
NATIVE_FP4 = ("sm_100", "sm_120")


def run_checks(*arguments, **environment):
    result = subprocess.run(
        [sys.executable, str(KERNELS), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "primitive checks passed" in result.stdout


def test_numerics_in_the_interpreter():
    run_checks(TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numerics_on_the_gpu():
    run_checks("cuda")


@pytest.fixture(scope="module")
def kernels():
    spec = importlib.util.spec_from_file_location("primitive_kernels", KERNELS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def require_backend(target):
    backends = triton.backends.backends
    name = {"cuda": "nvidia", "hip": "amd"}[target.backend]
    if name not in backends:
        pytest.skip(f"this Triton has no {name} backend")
    if not backends[name].compiler.supports_target(target):
        pytest.skip(f"this Triton's {name} backend does not support {target}")


def compile_kernel(kernel, target, constants, **types):
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=target)
    binary = compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]
    assert binary[:4] == b"\x7fELF"
    return compiled


@pytest.mark.parametrize("name", TARGETS)
def test_compiles_without_a_gpu(name, kernels, tmp_path, monkeypatch):
    target = TARGETS[name]
    require_backend(target)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rows = {"ROWS": 1, "COLS": 1024}
    compile_kernel(
        kernels.rotate_kernel, target, rows | {"GROUP": 256}, source="*fp32", out="*fp32"
    )
    compile_kernel(
        kernels.quantize_kernel,
        target,
        rows | {"STOCHASTIC": True},
        source="*fp32",
        qdata="*i8",
        scale="*fp32",
        seed="i64",
    )
    pointers = {"source": "*fp32", "global_scale": "*fp32", "qdata": "*u8", "scale": "*u8"}
    for native, stochastic in ((False, True), (name in NATIVE_FP4, False)):
        flags = {"TWO_LEVEL": True, "HIGH_FIRST": False, "NATIVE": native, "STOCHASTIC": stochastic}
        compiled = compile_kernel(
            kernels.nvfp4_kernel, target, flags | {"BLOCKS": 32}, seed="i64", **pointers
        )
        assert ("e2m1x2" in compiled.asm.get("ptx", "")) == native
