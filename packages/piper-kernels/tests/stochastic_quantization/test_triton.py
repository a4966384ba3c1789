import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from piper_kernels.stochastic_quantization.triton import seed_argument

KERNELS = Path(__file__).with_name("rounding_kernels.py")
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx1200": GPUTarget("hip", "gfx1200", 32),
    "gfx1201": GPUTarget("hip", "gfx1201", 32),
}


def test_numerics_in_the_interpreter(run_kernel_checks):
    run_kernel_checks(KERNELS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numerics_on_the_gpu(run_kernel_checks):
    run_kernel_checks(KERNELS, "cuda")


@pytest.fixture(scope="module")
def kernels():
    spec = importlib.util.spec_from_file_location("rounding_kernels", KERNELS)
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


@pytest.mark.parametrize("name", TARGETS)
def test_compiles_without_a_gpu(name, kernels, tmp_path, monkeypatch):
    target = TARGETS[name]
    require_backend(target)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source = ASTSource(
        fn=kernels.round_kernel,
        signature={
            "values": "*fp32",
            "deterministic": "*i8",
            "out": "*i8",
            "seed": "i64",
            "size": "i32",
            "BLOCK": "constexpr",
        },
        constexprs={"BLOCK": 128},
    )
    compiled = triton.compile(source, target=target)
    binary = compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]
    assert binary[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(None, 0), (0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)],
)
def test_seed_argument(seed, expected):
    assert seed_argument(seed) == expected
