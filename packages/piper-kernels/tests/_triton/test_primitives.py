from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

KERNELS = Path(__file__).with_name("primitive_kernels.py")


def test_numerics_in_the_interpreter(run_kernel_checks):
    run_kernel_checks(KERNELS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numerics_on_the_gpu(run_kernel_checks):
    run_kernel_checks(KERNELS, "cuda")
