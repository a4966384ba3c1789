"""Explicit operators exist once the helper of their fusion was called, in a fresh process."""

import subprocess
import sys

CODE = """
import sys
import torch
from piper_kernels.fusions import (
    convrot_int8_gelu_ffn, convrot_int8_piper, convrot_int8_sparse_piper, convrot_int8_swiglu_ffn,
    convrot_nvfp4_gelu_ffn, convrot_nvfp4_sparse_piper, convrot_nvfp4_swiglu_ffn, nvfp4_gelu_ffn,
    nvfp4_sparse_piper, nvfp4_swiglu_ffn,
)

assert not {"torchao", "torch._inductor.custom_graph_pass"} & set(sys.modules)
packages = [value for name, value in globals().items() if name.startswith(("convrot", "nvfp4"))]
assert len(packages) == 10
for package in packages:
    name = package.__name__.rpartition(".")[2]
    getattr(package, f"{name}_compile_options")()
    operators = [f"{name}_gated_updates_", name] if "ffn" in name else [f"{name}_attention_output"]
    if name == "convrot_int8_piper":
        operators = [f"{name}_project_{part}" for part in ("query", "key", "value")]
        operators.append(f"{name}_projected_query_attention_output")
    for operator in operators:
        assert hasattr(torch.ops.piper_kernels, operator), operator
print("registered")
"""


def test_helpers_register_their_operators():
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, check=False
    )
    assert result.stdout.strip().endswith("registered"), result.stderr
