"""The engine's Triton kernels: numerics in the interpreter or on a GPU, machine code for all."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.compiler import ASTSource

from phyai.triton import (
    activation,
    adaptive,
    causal_conv,
    embedding,
    fp8_rows,
    join_heads,
    norms,
    qk_norm,
    rope,
)

from .checks import WHERE
from .targets import TARGETS

CHECKS = Path(__file__).with_name("kernel_checks.py")
NO_FP8 = ("sm_80",)
KERNELS = {
    "rms": (norms._rms_kernel, {"GEMMA": True, "ADD": True, "BLOCK": 2048}),
    "layer": (norms._layer_kernel, {"HAS_BIAS": True, "ADD": True, "BLOCK": 2048}),
    "silu_mul": (norms._silu_mul_kernel, {"BLOCK": 2048}),
    "channel": (norms._channel_kernel, {"HAS_BIAS": True, "POSITIONS": 16, "BLOCK": 128}),
    "adaptive": (adaptive._adaptive_kernel, {"ADD": True, "BLOCK": 1024}),
    "modulate": (adaptive._modulate_kernel, {"BLOCK": 1024}),
    "activation": (activation._activation_kernel, {"KIND": 0, "GATED": True, "BLOCK": 1024}),
    "embedding": (embedding._embedding_kernel, {"BLOCK": 1024}),
    "rope": (
        rope._rope_kernel,
        {"HALF": 128, "INTERLEAVED": False, "REST": 8, "BLOCK": 128, "REST_BLOCK": 8},
    ),
    "rope_append": (
        rope._append_kernel,
        {"HEADS_Q": 8, "HEADS_K": 1, "HALF": 128, "BLOCK_H": 16, "BLOCK": 128},
    ),
    "qk_norm": (
        qk_norm._qk_norm_kernel,
        {
            "HEADS_Q": 4, "HEADS_K": 2, "HALF": 64, "CAST_FIRST": True,
            "HEADS_FIRST": True, "BLOCK_H": 8, "BLOCK": 64,
        },
    ),
    "fp8_activation": (
        fp8_rows._activation_rows_kernel,
        {"KIND": 2, "GATED": True, "BLOCK": 1024},
    ),
    "fp8_heads": (fp8_rows._head_rows_kernel, {"WIDTH": 128, "BLOCK": 1024}),
    "join_heads": (join_heads._join_kernel, {"WIDTH": 128, "BLOCK": 1024}),
    "fp8_norm": (
        fp8_rows._norm_rows_kernel,
        {"ADD": True, "CAST_FIRST": True, "BLOCK": 1024},
    ),
    "fp8_layer_norm": (fp8_rows._layer_rows_kernel, {"ADD": True, "BLOCK": 1024}),
    "causal_conv": (
        causal_conv._causal_conv_kernel,
        {"TAPS": 4, "SILU": True, "TOKENS": 16, "CHANNELS": 256},
    ),
}  # fmt: skip
POINTERS = {
    "bias": "*fp32",
    "cache": "*fp32",
    "codes": "*fp8e4nv",
    "eps": "fp32",
    "gate": "*bf16",
    "ids": "*i64",
    "key": "*bf16",
    "key_out": "*bf16",
    "keys": "*bf16",
    "qkv": "*bf16",
    "values": "*bf16",
    "modulation": "*fp32",
    "out": "*bf16",
    "positions": "*i64",
    "query": "*bf16",
    "query_out": "*bf16",
    "residual": "*bf16",
    "rotation": "*fp32",
    "scales": "*fp32",
    "shift": "*bf16",
    "slots": "*i64",
    "total": "*bf16",
    "weight": "*fp32",
    "weight_k": "*bf16",
    "weight_q": "*bf16",
    "x": "*bf16",
}
TYPES = {"modulate": {"scale": "*bf16"}, "channel": {"positions": "i32", "scale": "fp32"}}


@pytest.mark.parametrize("where", WHERE)
def test_numerics(where, run_kernel_checks):
    run_kernel_checks(CHECKS, *where)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("architecture", TARGETS)
def test_compiles_to_machine_code(name, architecture, tmp_path, monkeypatch):
    target = TARGETS[architecture]
    if name.startswith("fp8") and architecture in NO_FP8:
        pytest.skip("this architecture has no FP8")
    backend = {"cuda": "nvidia", "hip": "amd"}[target.backend]
    if backend not in triton.backends.backends:
        pytest.skip(f"this Triton has no {backend} backend")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, constants = KERNELS[name]
    types = POINTERS | TYPES.get(name, {})
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32")
        for argument in kernel.arg_names
    }
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=target)
    assert compiled.asm["cubin" if target.backend == "cuda" else "hsaco"][:4] == b"\x7fELF"
