"""Gated residual updates behind networks, and their kernel."""

import os
import subprocess
import sys

import pytest
import torch

from piper_kernels.fusions._ffn.gated_updates import GatedUpdates
from piper_kernels.fusions.convrot_int8_gelu_ffn import _ops as gelu_ops
from piper_kernels.fusions.convrot_int8_swiglu_ffn import _ops as swiglu_ops
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor


def rand(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def operands(rows=70, width=24, index_dtype=torch.int64, python_indexing=True):
    index = torch.arange(rows) % 5
    if python_indexing:
        index = index - (index > 2).long() * 5
    return GatedUpdates(
        rand(rows, width),
        rand(rows, width, seed=1),
        rand(5, 2 * width, seed=2)[:, :width],
        rand(5, width, dtype=torch.float32, seed=3),
        index.to(index_dtype),
        python_indexing,
    )


def expected_update(updates, ffn):
    index = updates.gate_indices.long() % 5
    return (
        updates.base.double()
        + updates.update_gate.double()[index] * updates.reusable_update.double()
        + updates.ffn_gate.double()[index] * ffn.double()
    )


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("python_indexing", [False, True])
def test_update_is_rounded_once(index_dtype, python_indexing):
    updates = operands(index_dtype=index_dtype, python_indexing=python_indexing)
    ffn = rand(70, 24, seed=4)
    expected = expected_update(updates, ffn)
    updates.apply(ffn[:32], 0)
    updates.apply(ffn[32:], 32)
    torch.testing.assert_close(updates.reusable_update.double(), expected, rtol=2**-8, atol=1e-6)


def make(rows, features, seed):
    dense = (rand(rows, features, dtype=torch.float32, seed=seed) / features**0.5).bfloat16()
    return ConvRotInt8Tensor.from_hp(dense, group_size=16)


@pytest.mark.parametrize("outputs", [24, 200])  # the result fits in the workspace, or not
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_operators_update_in_place(activation, outputs):
    weights = [make(64, 32, 1), make(64, 32, 2), make(outputs, 64, 3)]
    plain, gated = swiglu_ops.swiglu_ffn, swiglu_ops.swiglu_ffn_gated_updates_
    if activation == "gelu":
        weights = weights[1:]
        plain, gated = gelu_ops.gelu_ffn, gelu_ops.gelu_ffn_gated_updates_
    network = [item for w in weights for item in (w.qdata, w.scale, None, 16)]
    x = rand(70, 32)
    updates = operands(width=outputs)
    expected = expected_update(updates, plain(x, *network, 32))
    fields = (
        updates.base,
        updates.reusable_update,
        updates.update_gate,
        updates.ffn_gate,
        updates.gate_indices,
        True,
    )
    copies = (field.clone() if torch.is_tensor(field) else field for field in fields)
    torch.library.opcheck(gated, (x, *network, *copies, 32))
    assert gated(x, *network, *fields, 32) is None
    torch.testing.assert_close(updates.reusable_update.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("base", rand(70, 23), "base must be"),
        ("base", rand(70, 24, dtype=torch.float32), "base must be"),
        ("reusable_update", rand(24, 70).t(), "reusable_update must be contiguous"),
        ("update_gate", rand(5, 23), "update_gate must be floating"),
        ("ffn_gate", rand(24, 5).t(), "columns side by side"),
        ("gate_indices", torch.zeros(70), "int32 or int64"),
        ("gate_indices", torch.zeros(69, dtype=torch.int64), "int32 or int64"),
        ("gate_indices", torch.zeros(140, dtype=torch.int64)[::2], "must be contiguous"),
    ],
)
def test_errors(field, value, message):
    updates = operands()
    wrong = GatedUpdates(**{**vars(updates), field: value})
    with pytest.raises(ValueError, match=message):
        wrong.validate(rand(70, 32), 24)


def run(code, **environment):
    """Run code that prints ok at its end in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )
    assert result.stdout.strip().endswith("ok"), result.stderr


KERNEL = """
import torch
from piper_kernels.fusions._ffn import gated_updates, triton

for rows, width, indexing, dtype in (
    (7, 24, True, torch.int64), (3, 1500, False, torch.int32), (0, 8, True, torch.int64)
):
    base, update = torch.randn(rows, width).bfloat16(), torch.randn(rows, width).bfloat16()
    ffn = torch.randn(rows, 2 * width).bfloat16()[:, :width]
    first = torch.randn(5, 2 * width).bfloat16()[:, :width]
    second = torch.randn(5, width)
    index = (torch.arange(rows) % 5 - (5 if indexing else 0)).to(dtype)
    expected = update.clone()
    gated_updates._apply_portable(base, expected, ffn, first, second, index, indexing)
    triton.apply_gated_updates(base, update, ffn, first, second, index, indexing)
    assert torch.allclose(update.float(), expected.float(), rtol=2**-7, atol=1e-6)
print("ok")
"""


def test_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    run(KERNEL, TRITON_INTERPRET="1")


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from piper_kernels.fusions._ffn.triton import gated_updates_kernel

signature = {
    **dict.fromkeys(("base_ptr", "update_ptr", "ffn_ptr", "update_gate_ptr"), "*bf16"),
    "ffn_gate_ptr": "*fp32", "index_ptr": "*i64",
    **dict.fromkeys(
        ("width", "ffn_stride", "update_gate_stride", "ffn_gate_stride", "gates"), "i32"
    ),
    "PYTHON_INDEXING": "constexpr", "BLOCK": "constexpr",
}
for backend, arch, warp in (
    ("cuda", 80, 32), ("cuda", 89, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("cuda", 120, 32),
    ("hip", "gfx942", 64), ("hip", "gfx1200", 32), ("hip", "gfx1201", 32),
):
    source = ASTSource(gated_updates_kernel, signature, {"PYTHON_INDEXING": True, "BLOCK": 256})
    built = compile(source, target=GPUTarget(backend, arch, warp), options={"num_warps": 4})
    assert "cubin" in built.asm or "hsaco" in built.asm
print("ok")
"""


def test_kernel_compiles_for_every_target(tmp_path):
    pytest.importorskip("triton")
    run(COMPILE, TRITON_CACHE_DIR=str(tmp_path))
