from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

CHECKS = Path(__file__).with_name("triton_checks.py")


def test_numerics_in_the_interpreter(run_kernel_checks):
    run_kernel_checks(CHECKS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnTheGpu:
    def test_numerics(self, run_kernel_checks):
        run_kernel_checks(CHECKS, "cuda")

    def make(self, rows=130, features=1024, group_size=256, dtype=torch.bfloat16, **options):
        generator = torch.Generator().manual_seed(1)
        dense = torch.randn(rows, features, generator=generator).to(dtype)
        options = {"compute_per_tensor_scale": True, "is_swizzled_scales": True} | options
        if group_size:
            options["group_size"] = group_size
        cls = ConvRotNVFP4Tensor if group_size else PiperNVFP4Tensor
        return dense, cls.from_hp(dense, **options)

    @pytest.mark.parametrize("group_size", [0, 16, 256])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("two_level", [False, True])
    def test_updates_equal_the_cpu(self, group_size, dtype, two_level):
        dense, cpu = self.make(257, 768, group_size, dtype, compute_per_tensor_scale=two_level)
        weight = cpu.to("cuda", copy=True)
        inner = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
        pointers, versions = [p.data_ptr() for p in inner], [p._version for p in inner]
        mat1, mat2 = dense[:, :19], dense[:19]
        weight.add_(dense.cuda(), alpha=0)
        weight.addmm_(mat1.cuda(), mat2.cuda(), alpha=0)
        assert [p._version for p in inner] == versions
        weight.add_(dense.cuda(), alpha=0.5)
        weight.addmm_(mat1.cuda(), mat2.cuda(), beta=0.5, alpha=0.1)
        cpu.add_(dense, alpha=0.5)
        cpu.addmm_(mat1, mat2, beta=0.5, alpha=0.1)
        after = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
        assert all(a is b for a, b in zip(after, inner, strict=True))
        assert [p.data_ptr() for p in after] == pointers
        assert all(p._version > v for p, v in zip(after, versions, strict=True))
        actual, expected = weight.dequantize(torch.float32).cpu(), cpu.dequantize(torch.float32)
        assert (actual - expected).norm() < 0.02 * expected.norm()
        if two_level:
            torch.testing.assert_close(
                weight.per_tensor_scale.cpu(), cpu.per_tensor_scale, rtol=1e-5, atol=0
            )

    def test_seeds_replay_and_leave_the_generators_alone(self):
        dense, cpu = self.make()
        states = torch.get_rng_state(), torch.cuda.get_rng_state()
        results = []
        for seed in (2**64 - 1, 2**64 - 1, 2**64 - 2):
            weight = cpu.to("cuda", copy=True)
            weight.add_(dense.cuda(), alpha=0.1, rounding_seed=seed)
            weight.addmm_(dense[:, :3].cuda(), dense[:3].cuda(), alpha=0.1, rounding_seed=seed)
            results.append(weight.qdata)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert torch.equal(torch.cuda.get_rng_state(), states[1])
        assert torch.equal(results[0], results[1])
        assert not torch.equal(results[0], results[2])

    def test_workspaces_are_bounded(self):
        rows, features, rank = 4096, 4096, 16
        dense = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16)
        weight = self.make(rows, features)[1].to("cuda")
        mat1, mat2 = dense[:, :rank].contiguous(), dense[:rank].contiguous()
        for run, bound in (
            (lambda: weight.add_(dense), 0),
            (lambda: weight.add_(dense, rounding_seed=1), 0),
            (lambda: weight.addmm_(mat1, mat2, rounding_seed=1), 4 * rank * features),
        ):
            run()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            torch.cuda.synchronize()
            assert torch.cuda.max_memory_allocated() - before <= bound + (1 << 16)

    def test_is_capturable_in_a_cuda_graph(self):
        dense, cpu = self.make(64, 512)
        eager, captured = cpu.to("cuda", copy=True), cpu.to("cuda", copy=True)
        update, mat1, mat2 = dense.cuda(), dense[:, :5].cuda(), dense[:5].cuda()

        def merge(weight):
            weight.add_(update, alpha=0.5, rounding_seed=3)
            weight.addmm_(mat1, mat2, alpha=0.1)

        merge(eager)  # compiles the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            merge(captured)
        for name in captured.__tensor_flatten__()[0]:
            getattr(captured, name).copy_(getattr(cpu, name))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured.qdata, eager.qdata)
        assert torch.equal(captured.scale.view(torch.uint8), eager.scale.view(torch.uint8))
        assert torch.equal(captured.per_tensor_scale, eager.per_tensor_scale)

    def test_updates_compile(self):
        dense, cpu = self.make(64, 512)
        eager, compiled = cpu.to("cuda", copy=True), cpu.to("cuda", copy=True)
        operands = dense.cuda(), dense[:, :5].cuda(), dense[:5].cuda()

        def merge(weight, update, mat1, mat2):
            weight.add_(update, alpha=0.5)
            weight.addmm_(mat1, mat2, alpha=0.1)
            return weight.dequantize()

        expected = merge(eager, *operands)
        actual = torch.compile(merge, backend="aot_eager", fullgraph=True)(compiled, *operands)
        assert torch.equal(actual, expected)
        assert torch.equal(compiled.qdata, eager.qdata)

    def test_failures_are_not_retried(self, monkeypatch):
        from piper_kernels.weights.nvfp4 import triton

        def fail(*operands):
            operands[0].fill_(1)
            raise RuntimeError("the kernel failed")

        dense, cpu = self.make(5, 256)
        weight = cpu.to("cuda", copy=True)
        monkeypatch.setattr(triton, "add_", fail)
        with pytest.raises(RuntimeError, match="the kernel failed"):
            weight.add_(dense.cuda())
        assert weight.qdata.unique().tolist() == [1]

    def test_offsets_beyond_int32(self, large_device_memory):
        rows, features = 80_000, 28_672
        weight = PiperNVFP4Tensor(
            torch.zeros(rows, features // 2, dtype=torch.uint8, device="cuda"),
            torch.zeros(
                rows // 128 * 32, features // 64 * 16, dtype=torch.uint8, device="cuda"
            ).view(torch.float8_e4m3fn),
            16,
            torch.bfloat16,
            torch.ones((), device="cuda"),
            is_swizzled_scales=True,
        )
        update = torch.zeros(rows, features, dtype=torch.bfloat16, device="cuda")
        update[:] = 2.25
        update[:, ::16] = 6
        weight.add_(update, rounding_seed=5)
        first, beyond = weight.qdata[1], weight.qdata[1 + (1 << 31) // features]
        assert first.unique().numel() > 2
        assert not torch.equal(first, beyond)
        assert weight.qdata[-1].unique().numel() > 2
        update.zero_()
        weight.add_(update, alpha=1.0)
        mat1 = torch.zeros(rows, 1, dtype=torch.bfloat16, device="cuda")
        mat1[[0, rows - 1]] = 1
        weight.addmm_(mat1, update[:1] + 1, beta=0)
        assert weight.qdata[0].unique().tolist() == [0x77]
        assert torch.equal(weight.qdata[-1], weight.qdata[0])
        assert not weight.qdata[1:-1].any()
