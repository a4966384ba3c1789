"""The kernels between convolutions: numerics in the interpreter or on a GPU, and machine code."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.compiler import ASTSource

from phyai.triton import channel_rows

from .checks import WHERE
from .targets import TARGETS

CHECKS = Path(__file__).with_name("channel_row_checks.py")
KERNELS = {
    "norm": (channel_rows._norm_kernel, {"HAS_BIAS": True, "SILU": True, "ROWS": 16, "BLOCK": 256}),
    "add": (channel_rows._add_kernel, {"ROWS": 4, "BLOCK": 1024}),
    "spread": (
        channel_rows._spread_kernel,
        {"STEPS": 2, "FIRST": 0, "CELL": 8, "REPEATS": 8, "ROWS": 4, "BLOCK": 1024},
    ),
}
SIZES = ("rows", "columns", "channels", "inputs", "positions")
TYPES = {"gain": "*fp32", **dict.fromkeys(SIZES, "i32")}


@pytest.mark.parametrize("where", WHERE)
def test_numerics(where, run_kernel_checks):
    run_kernel_checks(CHECKS, *where)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("architecture", TARGETS)
def test_compiles_to_machine_code(name, architecture, tmp_path, monkeypatch):
    target = TARGETS[architecture]
    backend = {"cuda": "nvidia", "hip": "amd"}[target.backend]
    if backend not in triton.backends.backends:
        pytest.skip(f"this Triton has no {backend} backend")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, constants = KERNELS[name]
    signature = {
        argument: "constexpr" if argument in constants else TYPES.get(argument, "*bf16")
        for argument in kernel.arg_names
    }
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=target)
    assert compiled.asm["cubin" if target.backend == "cuda" else "hsaco"][:4] == b"\x7fELF"
