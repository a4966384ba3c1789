"""Sums of the parts of products: numbers in the interpreter, machine code for all targets."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from phyai.triton import part_sums

TARGETS = [GPUTarget("cuda", number, 32) for number in (80, 89, 90, 100, 120)]
TARGETS += [GPUTarget("hip", name, 32) for name in ("gfx1200", "gfx1201")]
CHECK = """
import torch
from phyai.triton.part_sums import sum_parts
for parts, rows, columns in ((2, 1, 1), (3, 7, 13), (4, 5, 1031)):
    values = torch.randn(parts, rows, columns) * torch.tensor([1e4, 1, 1e-4, 1])[:parts, None, None]
    for bias in (None, torch.randn(columns).bfloat16(), torch.randn(columns)):
        out = torch.full((rows, columns), torch.nan)
        sum_parts(values, bias, out)
        wanted = values[0].clone()
        for part in values[1:]:
            wanted += part
        assert torch.equal(out, wanted if bias is None else wanted + bias.float())
        rounded = torch.full((rows, columns), torch.nan, dtype=torch.bfloat16)
        sum_parts(values, bias, rounded)
        assert ((rounded.float() - out).abs() <= 8e-3 * out.abs()).all()
print("sums agree")
"""


def test_numbers_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "sums agree" in done.stdout


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.backend}-{target.arch}")
def test_compiles(target, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = part_sums._sum_parts_kernel
    constants = {"SPLITS": 3, "HAS_BIAS": True, "BLOCK": part_sums._BLOCK}
    types = {"parts": "*fp32", "bias": "*bf16", "out": "*bf16"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    assert triton.compile(ASTSource(kernel, signature, constants), target=target).asm
