"""Projections to quantized operands in Triton's interpreter and on a GPU."""

from pathlib import Path

import pytest
import torch
from projection_operands import operands

pytest.importorskip("triton", reason="Triton is not installed")

CHECKS = Path(__file__).with_name("projection_checks.py")


def test_numerics_in_the_interpreter(run_kernel_checks):
    run_kernel_checks(CHECKS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numerics_on_the_gpu(run_kernel_checks):
    run_kernel_checks(CHECKS, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "outputs"), [(65, 128), (1000, 1024), (4096, 4096), (8192, 4096)])
def test_fp32_products_of_windows_are_exact(rows, outputs):
    """Each schedule of the product stores FP32 as the reference does."""
    from piper_kernels.linear.convrot.int8 import reference
    from piper_kernels.linear.convrot.int8._backend import select_linear_backend

    case = operands(rows, features=512, heads=outputs // 128, bias=torch.bfloat16).to("cuda")
    p = case.projection
    arguments = (*(x[0] for x in (case.inputs.qdata, case.inputs.scale)), p.qdata, p.scale)
    backend = select_linear_backend(case.inputs.qdata.device)
    out = torch.full((rows, outputs), torch.nan, device="cuda")
    backend.linear_prepared(*arguments, p.bias, torch.float32, out=out)
    assert torch.equal(out, reference.linear_prepared(*arguments, torch.float32, p.bias))
