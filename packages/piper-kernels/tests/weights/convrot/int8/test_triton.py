from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor, _backend

CHECKS = Path(__file__).with_name("triton_checks.py")


def test_numerics_in_the_interpreter(run_kernel_checks):
    run_kernel_checks(CHECKS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnTheGpu:
    def test_numerics(self, run_kernel_checks):
        run_kernel_checks(CHECKS, "cuda")

    def make(self, rows=130, features=5376, dtype=torch.bfloat16, group_size=256):
        generator = torch.Generator().manual_seed(1)
        dense = torch.randn(rows, features, generator=generator).to(dtype)
        return dense, ConvRotInt8Tensor.from_hp(dense, group_size=group_size)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("features", [256, 4352, 16384, 65536])
    def test_from_hp_equals_the_cpu(self, dtype, features):
        dense, expected = self.make(33, features, dtype)
        actual = ConvRotInt8Tensor.from_hp(dense.cuda(), group_size=256)
        assert (actual.dtype, actual.shape) == (dtype, dense.shape)
        torch.testing.assert_close(actual.scale.cpu(), expected.scale, rtol=2e-6, atol=0)
        assert (actual.qdata.cpu().int() - expected.qdata.int()).abs().max() <= 1

    def test_conv3d_weights_equal_the_cpu(self):
        dense = torch.randint(-8, 9, (5, 64, 3, 3, 3)).float()
        expected = ConvRotInt8Tensor.from_hp(dense, group_size=64)
        actual = ConvRotInt8Tensor.from_hp(dense.cuda(), group_size=64)
        assert torch.equal(actual.qdata.cpu(), expected.qdata)
        assert torch.equal(actual.scale.cpu(), expected.scale)

    def test_updates_keep_storage_and_bump_versions(self):
        dense, cpu = self.make()
        weight = ConvRotInt8Tensor.from_quantized(
            cpu.qdata.cuda(), cpu.scale.cuda(), group_size=256,
            act_per_tensor_scale=torch.tensor(0.5, device="cuda"),
        )  # fmt: skip
        inner = weight.qdata, weight.scale, weight.act_per_tensor_scale
        pointers = [part.data_ptr() for part in inner]
        mat1, mat2 = dense[:, :32].contiguous(), dense[:32]
        operands = (dense.cuda(), mat1.cuda(), mat2.cuda())
        weight.add_(operands[0], alpha=0)
        weight.addmm_(*operands[1:], alpha=0)
        assert [part._version for part in inner] == [0, 0, 0]
        weight.add_(operands[0], alpha=0.5)
        assert [part._version > 0 for part in inner] == [True, True, False]
        weight.addmm_(*operands[1:], alpha=0.1)
        cpu.add_(dense, alpha=0.5)
        cpu.addmm_(mat1, mat2, alpha=0.1)
        after = weight.qdata, weight.scale, weight.act_per_tensor_scale
        assert all(a is b for a, b in zip(after, inner, strict=True))
        assert [part.data_ptr() for part in after] == pointers
        assert weight.act_per_tensor_scale.item() == 0.5
        torch.testing.assert_close(weight.scale.cpu(), cpu.scale, rtol=2e-5, atol=0)
        assert (weight.qdata.cpu().int() - cpu.qdata.int()).abs().max() <= 1

    def test_seeds_replay_and_leave_the_generators_alone(self):
        dense, cpu = self.make()
        states = torch.get_rng_state(), torch.cuda.get_rng_state()
        results = []
        for seed in (2**64 - 1, 2**64 - 1, 2**64 - 2, 7):
            weight = cpu.to("cuda", copy=True)
            weight.add_(dense.cuda() * 0.01, rounding_seed=seed)
            weight.addmm_(dense[:, :3].cuda(), dense[:3].cuda() * 0.01, rounding_seed=seed)
            results.append(weight.qdata)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert torch.equal(torch.cuda.get_rng_state(), states[1])
        assert torch.equal(results[0], results[1])
        assert not torch.equal(results[0], results[2])
        assert not torch.equal(results[0], results[3])

    def test_workspaces_are_bounded(self):
        rows, features, rank = 4096, 4096, 16
        weight = ConvRotInt8Tensor.from_hp(
            torch.randn(rows, features, device="cuda", dtype=torch.bfloat16), group_size=256
        )
        update = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16)
        mat1, mat2 = update[:, :rank].contiguous(), update[:rank].contiguous()
        slack = 1 << 16
        for run, bound in (
            (lambda: weight.add_(update), 0),
            (lambda: weight.addmm_(mat1, mat2), 4 * (rows + rank * features)),
            (lambda: weight.addmm_(mat1, mat2, rounding_seed=1), 4 * (rows + rank * features)),
        ):
            run()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            torch.cuda.synchronize()
            assert torch.cuda.max_memory_allocated() - before <= bound + slack

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
        captured.qdata.copy_(cpu.qdata)
        captured.scale.copy_(cpu.scale)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured.qdata, eager.qdata)
        assert torch.equal(captured.scale, eager.scale)

    def test_updates_compile(self):
        dense, cpu = self.make(64, 512)
        eager, compiled = cpu.to("cuda", copy=True), cpu.to("cuda", copy=True)
        update, mat1, mat2 = dense.cuda(), dense[:, :5].cuda(), dense[:5].cuda()

        def merge(weight, update, mat1, mat2):
            weight.add_(update, alpha=0.5)
            weight.addmm_(mat1, mat2, alpha=0.1)
            return weight.dequantize()

        expected = merge(eager, update, mat1, mat2)
        actual = torch.compile(merge, backend="aot_eager", fullgraph=True)(
            compiled, update, mat1, mat2
        )
        assert torch.equal(actual, expected)
        assert torch.equal(compiled.qdata, eager.qdata)

    def test_failures_are_not_retried(self, monkeypatch):
        from piper_kernels.weights.convrot.int8 import triton

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
        # 80,000 x 28,672 elements: rows from 74,899 on lie past 2**31.
        rows, features = 80_000, 28_672
        dense = torch.zeros(rows, features, dtype=torch.bfloat16, device="cuda")
        pattern = torch.arange(1, 257, device="cuda", dtype=torch.bfloat16)
        for row in (0, 74_898, 74_899, rows - 1):
            dense[row].view(-1, 256)[:] = pattern
        weight = ConvRotInt8Tensor.from_hp(dense, group_size=256)
        first = weight.qdata[0].clone()
        assert first.any()
        for row in (74_898, 74_899, rows - 1):
            assert torch.equal(weight.qdata[row], first)
        assert weight.scale[1].item() == torch.tensor(1e-30).item()
        mat1 = torch.zeros(rows, 1, dtype=torch.bfloat16, device="cuda")
        mat1[[0, rows - 1]] = 1
        weight.addmm_(mat1, dense[:1].clone())
        assert torch.equal(weight.qdata[rows - 1], first)
        torch.testing.assert_close(weight.scale[rows - 1], weight.scale[0])
        del dense
        update = torch.full((rows, features), 0.3, dtype=torch.bfloat16, device="cuda")
        weight.add_(update, rounding_seed=5)
        # Rows 2**32 elements apart do not exist here; 2**31 apart must differ.
        assert not torch.equal(weight.qdata[1], weight.qdata[1 + (1 << 31) // features])


def test_cpu_selects_the_reference():
    from piper_kernels.weights.convrot.int8 import _update_reference

    qdata = torch.zeros(2, 16, dtype=torch.int8)
    assert _backend.select_update_backend(qdata) is _update_reference
    assert not _backend.runs_in_operators(torch.device("cpu"))
    assert not _backend.runs_in_operators(torch.device("meta"))
    assert _backend.runs_in_operators(torch.device("cuda"))
