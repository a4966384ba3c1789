"""The operators of ``torch.ops.piper_kernels`` equal ``public_operators.txt``, one schema a line.

Their names and schemas are part of the contract in ``VERSIONING.md``. After a wanted change, write
the file anew with ``PIPER_WRITE_SURFACE=1`` and say in the changelog what changed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Modules of kernels are imported too.
pytest.importorskip("triton")
STORED = Path(__file__).with_name("public_operators.txt")
# Operators are defined where they are used first: every module is imported.
SCHEMAS = """
import importlib
import pkgutil

import piper_kernels
import torch

for module in pkgutil.walk_packages(piper_kernels.__path__, "piper_kernels."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in torch._C._dispatch_get_all_op_names():
    namespace, _, operator = name.partition("::")
    if namespace == "piper_kernels":
        print(getattr(torch.ops.piper_kernels, operator).default._schema)
"""


@pytest.fixture(scope="module")
def schemas():
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCHEMAS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = sorted(result.stdout.splitlines())
    if os.environ.get("PIPER_WRITE_SURFACE") == "1":
        STORED.write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
    return found


def test_the_schemas_are_the_stored_ones(schemas):
    assert schemas == STORED.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    "name",
    [
        "convrot_int8_linear",
        "convrot_int8_prepare_input",
        "convrot_int8_linear_prepared",
        "convrot_int8_dequantized_input_mean",
        "convrot_int8_add_",
        "convrot_int8_addmm_",
        "convrot_int8_conv3d",
        "convrot_int8_group_norm_silu_conv3d",
        "convrot_nvfp4_linear",
        "convrot_nvfp4_prepare_input",
        "minimax_h3_vae_convrot_int8_linear_prepared",
        "nvfp4_linear",
        "nvfp4_prepare_input",
        "nvfp4_linear_prepared",
        "nvfp4_add_",
        "nvfp4_addmm_",
        "piper_attention",
        "piper_attention_from_quantized",
        "piper_attention_from_quantized_query",
        "sage_attention_2pp",
        "sparse_piper_attention",
        "sparse_piper_attention_from_quantized",
        "sparse_piper_attention_with_coarse_residual_from_quantized",
        "sparse_piper_coarse_residual",
    ],
)
def test_an_operator_that_callers_name_is_there(schemas, name):
    assert [line for line in schemas if line.startswith(f"piper_kernels::{name}(")]
