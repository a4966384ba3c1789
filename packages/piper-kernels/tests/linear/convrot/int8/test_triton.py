from pathlib import Path

import pytest
import torch
from process_state import no_synchronization

pytest.importorskip("triton", reason="Triton is not installed")

from torch.nn import functional

from piper_kernels.linear.convrot import convrot_int8_linear
from piper_kernels.linear.convrot.int8 import _selection, _triton_backend, reference
from piper_kernels.linear.convrot.int8._backend import select_linear_backend
from piper_kernels.linear.convrot.int8._integer_matmul import integer_matmul
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

CHECKS = Path(__file__).with_name("triton_checks.py")


def test_numerics_in_the_interpreter(run_kernel_checks):
    run_kernel_checks(CHECKS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnTheGpu:
    def test_numerics(self, run_kernel_checks):
        run_kernel_checks(CHECKS, "cuda")

    def weight(self, rows, features, group_size=64):
        generator = torch.Generator().manual_seed(rows)
        dense = torch.randn(rows, features, generator=generator)
        return ConvRotInt8Tensor.from_hp(dense.bfloat16(), group_size=group_size).to("cuda")

    @pytest.mark.parametrize("rows", [0, 1, 7, 31, 33, 127, 129, 1000])
    @pytest.mark.parametrize(("columns", "features"), [(33, 320), (520, 1040 * 16), (4096, 2048)])
    def test_products_are_exact(self, rows, columns, features):
        x = torch.randn(rows, features, device="cuda").bfloat16()
        weight = self.weight(columns, features)
        bias = torch.randn(2 * columns, device="cuda")[::2]
        backend = select_linear_backend(x.device)
        qdata, scale = backend.prepare_input(x, 64)
        products = integer_matmul(qdata, weight.qdata).float()
        expected = (products * scale[:, None]) * weight.scale.view(1, -1) + bias
        actual = functional.linear(x, weight, bias)
        assert torch.equal(actual, expected.bfloat16())

    def test_paired_projections_in_rows_of_a_larger_output(self):
        x = torch.randn(2, 100, 512, device="cuda").bfloat16()
        first, second = self.weight(264, 512), self.weight(265, 512).qdata[:264].contiguous()
        scale = torch.rand(264, 1, device="cuda")
        backend = select_linear_backend(x.device)
        prepared = backend.prepare_input(x, 64)
        out = torch.full((2, 100, 600), torch.nan, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(264, device="cuda").half()
        result = backend.linear_prepared(
            *prepared, first.qdata, first.scale, bias, torch.bfloat16,
            out=out[..., 8:536], second_projection=(second, scale, None),
        )  # fmt: skip
        one = backend.linear_prepared(*prepared, first.qdata, first.scale, bias, torch.bfloat16)
        two = backend.linear_prepared(*prepared, second, scale, None, torch.bfloat16)
        assert torch.equal(result, torch.cat([one, two], -1))
        assert out[..., :8].isnan().all()
        assert out[..., 536:].isnan().all()

    def test_misaligned_operands_take_the_generic_kernel(self, monkeypatch):
        weight = self.weight(64, 512)
        storage = torch.empty(64 * 512 + 1, dtype=torch.int8, device="cuda")[1:]
        moved = storage.view(64, 512).copy_(weight.qdata)
        x = torch.randn(40, 512, device="cuda").bfloat16()
        backend = select_linear_backend(x.device)
        prepared = backend.prepare_input(x, 64)
        expected = backend.linear_prepared(
            *prepared, weight.qdata, weight.scale, None, torch.float32
        )
        for qdata in (moved, weight.qdata):
            actual = backend.linear_prepared(*prepared, qdata, weight.scale, None, torch.float32)
            assert torch.equal(actual, expected)
            monkeypatch.setattr(_selection, "hopper_is_installed", lambda: False)

    @pytest.mark.parametrize("activation", [None, "gelu_tanh", "swiglu"])
    def test_linears_never_synchronize(self, activation):
        weight = self.weight(128, 256)
        x = torch.randn(3, 512 if activation == "swiglu" else 256, device="cuda").bfloat16()
        convrot_int8_linear(x, weight, activation_fn=activation)
        with no_synchronization():
            result = convrot_int8_linear(x, weight, activation_fn=activation)
        expected = reference.linear(
            x.cpu(), weight.qdata.cpu(), weight.scale.cpu(), 64, activation_fn=activation
        )
        assert (result.cpu() - expected).norm() / expected.norm() < 5e-3

    @pytest.mark.parametrize("rows", [1, 50, 300])
    def test_replays_in_a_cuda_graph(self, rows):
        weight = self.weight(2048, 4096)
        x = torch.randn(rows, 4096, device="cuda").bfloat16()
        functional.linear(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = functional.linear(x, weight)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(captured, functional.linear(x, weight))

    def test_rows_past_32_bit_offsets(self, large_device_memory):
        rows, columns = 80_000, 28_672
        guard = torch.full((rows + 2, columns), torch.nan, device="cuda", dtype=torch.bfloat16)
        out = guard[1:-1]
        qdata = torch.randint(-128, 128, (rows, 64), dtype=torch.int8, device="cuda")
        weight = torch.randint(-128, 128, (columns, 64), dtype=torch.int8, device="cuda")
        scale, w_scale = torch.rand(rows, device="cuda"), torch.rand(columns, 1, device="cuda")
        _triton_backend.multiply(qdata, scale, (weight, w_scale, None), None, out)
        assert guard[0].isnan().all()
        assert guard[-1].isnan().all()
        for first in (0, 37_000, 74_898, 79_900):
            part = slice(first, first + 100)
            products = integer_matmul(qdata[part], weight).float()
            expected = (products * scale[part, None]) * w_scale.view(1, -1)
            assert torch.equal(out[part], expected.bfloat16())
