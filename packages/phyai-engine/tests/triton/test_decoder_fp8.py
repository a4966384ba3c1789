"""The fused decoder kernels with FP8 weights: numerics, machine code, and which row is chosen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.compiler import ASTSource

from phyai.dispatch import KernelQuery, Selector
from phyai.dispatch.catalog import build_catalog
from phyai.triton import skinny_fp8
from phyai_quant import QuantScheme, TensorQuant, materialize

from .targets import TARGETS

CHECKS = Path(__file__).with_name("decoder_fp8_checks.py")
BLOCKS = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "WIDE": False}
KERNELS = {
    "gate_up": (skinny_fp8._consume_fp8_kernel, {"FORM": 1, "TILES": 32, **BLOCKS}),
    "qkv": (skinny_fp8._consume_fp8_kernel, {"FORM": 2, "TILES": 32, **BLOCKS, "BLOCK_N": 32}),
    "residual": (skinny_fp8._produce_fp8_kernel, {"SPLITS": 8, **BLOCKS}),
}
BF16 = ("x", "out", "keys", "values", "residual", "scaled")
FP32 = ("squares", "weight_scale", "constant", "rotation", "gate", "scale", "partial")
FP8_TARGETS = [name for name in TARGETS if name != "sm_80"]
"""Older devices have no FP8; the row is for newer ones."""


def signature(kernel, constants):
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(BF16, "*bf16") | dict.fromkeys(FP32, "*fp32")
    types |= {"weight": "*fp8e4nv", "counters": "*i32", "eps": "fp32"}
    return {key: "constexpr" if key in constants else types[key] for key in kernel.arg_names}


@pytest.mark.parametrize("target", FP8_TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name, target):
    kernel, constants = KERNELS[name][0], dict(KERNELS[name][1])
    if target != "sm_90":  # less shared memory
        constants["BLOCK_K"] = 64
    options = {"num_warps": 4, "num_stages": 2 if target == "sm_90" else 1}
    source = ASTSource(kernel, signature(kernel, constants), constexprs=constants)
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    assert compiled.asm


def test_a_hopper_multiplies_from_registers():
    """A weight that went back to shared memory after its conversion would cost what FP8 saves."""
    kernel, constants = KERNELS["gate_up"]
    source = ASTSource(kernel, signature(kernel, constants), constexprs=constants)
    compiled = triton.compile(source, target=TARGETS["sm_90"], options={"num_stages": 4})
    (operand,) = {
        line.rsplit(" : ", 1)[1].split(" * ")[0]
        for line in compiled.asm["ttgir"].splitlines()
        if "warp_group_dot %" in line
    }
    assert operand.startswith("tensor<64x128xbf16, #ttg.dot_op<{opIdx = 0"), operand


@pytest.mark.parametrize("where", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_numerics(where):
    if where == "cuda" and not (
        torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    ):
        pytest.skip("needs a CUDA device with FP8")
    environment = dict(os.environ)
    if where == "interpreter":
        environment["TRITON_INTERPRET"] = "1"
    arguments = [where] if where == "cuda" else []
    done = subprocess.run(
        [sys.executable, str(CHECKS), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


SIZES = {
    "tokens": 50, "hidden": 1024, "mlp": 4096, "heads": 8, "kv_heads": 1, "head_dim": 256,
}  # fmt: skip


def chosen(stored_by="fp8_rows", device="nvidia:sm90", adaptive=True, **changes):
    quant = TensorQuant("fp8_e4m3", "per_channel")
    scheme = QuantScheme(
        quant, TensorQuant("fp8_e4m3", "per_channel", dynamic=True), online=True,
        stored_by=stored_by,
    )  # fmt: skip
    signature = materialize(scheme, 90).physical_signature
    query = KernelQuery.build(
        "decoder_layers",
        device=device,
        dtype={"input": "bf16"},
        quant=signature,
        shape=SIZES | changes,
        attrs={"adaptive": adaptive, "segments": True, "shared_modulation": True},
    )
    return Selector(build_catalog(), device=device).explain(query).selected


def test_which_row_is_chosen(monkeypatch):
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)
    assert chosen() == "triton.decoder_layers.fp8"
    for changes in (
        {"tokens": 257}, {"mlp": 4608}, {"hidden": 1280}, {"head_dim": 128}, {"kv_heads": 2},
        {"adaptive": False}, {"device": "nvidia:sm89"}, {"stored_by": None},
    ):  # fmt: skip
        assert chosen(**changes) == "layers.decoder_layers", changes
