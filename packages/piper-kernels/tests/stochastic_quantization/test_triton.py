from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import machine_code

from piper_kernels.stochastic_quantization.triton import seed_argument

KERNELS = Path(__file__).with_name("rounding_kernels.py")


def test_numerics_in_the_interpreter(run_kernel_checks):
    run_kernel_checks(KERNELS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numerics_on_the_gpu(run_kernel_checks):
    run_kernel_checks(KERNELS, "cuda")


@pytest.fixture(scope="module")
def kernels(load_module):
    return load_module(KERNELS)


@pytest.mark.parametrize("name", machine_code.SUPPORTED)
def test_compiles_without_a_gpu(name, kernels, own_compiler_cache):
    types = {"values": "*fp32", "deterministic": "*i8", "out": "*i8", "seed": "i64"}
    machine_code.build(kernels.round_kernel, name, {"BLOCK": 128}, types)


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(None, 0), (0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)],
)
def test_seed_argument(seed, expected):
    assert seed_argument(seed) == expected
