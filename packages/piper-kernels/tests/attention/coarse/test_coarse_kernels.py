"""The coarse kernels, in Triton's interpreter and on a GPU."""

from pathlib import Path

import pytest
import torch
from process_state import no_synchronization

from piper_kernels import sparse_piper_coarse_residual
from piper_kernels.attention.coarse import reference
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode

pytest.importorskip("triton", reason="Triton is not installed")

import machine_code

CHECKS = Path(__file__).with_name("coarse_checks.py")


def test_numerics_in_the_interpreter(run_kernel_checks):
    run_kernel_checks(CHECKS)


@pytest.mark.parametrize("target", machine_code.SUPPORTED)
def test_compiles(target, own_compiler_cache):
    from piper_kernels.attention.coarse import _kernels

    floats = dict.fromkeys(("query_summary", "key_summary", "key_aux", "value_mean"), "*fp32")
    types = floats | dict.fromkeys(("query", "key", "value"), "*bf16") | {"lengths": "*i32"}
    constants = {"D": 128, "MINMAX": True, "HAS_LENGTHS": True}
    machine_code.build(_kernels.summarize_kernel, target, constants, types)
    types = {"coarse": "*fp32", "gate": "*bf16", "out": "*bf16"}
    machine_code.build(_kernels.gate_kernel, target, {"D": 128, "ROWS": 32}, types)
    names = ("query", "key", "key_aux", "value_mean", "out")
    types = dict.fromkeys(names, "*fp32") | {"scale": "fp32"}
    precision = "tf32x3" if target.startswith("sm_") else "ieee"
    constants = {"D": 128, "ROWS": 16, "COLUMNS": 32, "DEPTH": 32, "PRECISION": precision}
    for minmax in (False, True):
        machine_code.build(_kernels.attend_kernel, target, constants | {"MINMAX": minmax}, types)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnTheGpu:
    def test_numerics(self, run_kernel_checks):
        run_kernel_checks(CHECKS, "cuda")

    def test_the_operator_is_captured_and_does_not_synchronize(self):
        live = [torch.randn(1, 193, 2, 64, device="cuda") for _ in range(4)]
        options = {"routing": "minmax", "coarse_scale": 0.125}
        eager = sparse_piper_coarse_residual(*live, **options)
        wanted = reference.coarse_residual(*live, 4, 0.125, RoutingMode.MINMAX, None)
        torch.testing.assert_close(eager, wanted, rtol=2e-5, atol=2e-6)
        with no_synchronization():
            sparse_piper_coarse_residual(*live, **options)
        inputs = [torch.zeros_like(x) for x in live]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = sparse_piper_coarse_residual(*inputs, **options)
        for destination, source in zip(inputs, live, strict=True):
            destination.copy_(source)
        graph.replay()
        assert torch.equal(captured, eager)
