"""Sums of the parts of products: numbers in the interpreter, machine code for all targets."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.compiler import ASTSource

from phyai.triton import part_sums

from .targets import TARGETS

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
print("checks passed")
"""


def test_numbers_in_the_interpreter(run_kernel_checks, tmp_path):
    script = tmp_path / "part_sum_checks.py"
    script.write_text(CHECK)
    run_kernel_checks(script)


@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = part_sums._sum_parts_kernel
    constants = {"SPLITS": 3, "HAS_BIAS": True, "BLOCK": part_sums._BLOCK}
    types = {"parts": "*fp32", "bias": "*bf16", "out": "*bf16"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    assert triton.compile(ASTSource(kernel, signature, constants), target=TARGETS[target]).asm
