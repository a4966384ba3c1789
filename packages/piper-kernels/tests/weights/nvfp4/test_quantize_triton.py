"""The quantization kernels: in the interpreter, as machine code, and on a GPU."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor, _quantize_reference

CHECKS = Path(__file__).with_name("quantize_checks.py")


def test_numerics_in_the_interpreter(run_kernel_checks):
    run_kernel_checks(CHECKS)


def as_bytes(tensor):
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnTheGpu:
    def test_numerics(self, run_kernel_checks):
        run_kernel_checks(CHECKS, "cuda")

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("swizzled", [False, True])
    @pytest.mark.parametrize("mode", ["none", "given", "computed"])
    def test_from_hp_equals_the_cpu(self, dtype, swizzled, mode):
        dense = torch.randn(257, 1040, generator=torch.Generator().manual_seed(1)).to(dtype)
        level = torch.tensor(0.002) if mode == "given" else None
        options = {"is_swizzled_scales": swizzled, "compute_per_tensor_scale": mode == "computed"}
        expected = PiperNVFP4Tensor.from_hp(dense, per_tensor_scale=level, **options)
        given = None if level is None else level.cuda()
        actual = PiperNVFP4Tensor.from_hp(dense.cuda(), per_tensor_scale=given, **options)
        assert torch.equal(actual.qdata.cpu(), expected.qdata)
        assert torch.equal(as_bytes(actual.scale), as_bytes(expected.scale))
        if mode == "given":
            assert actual.per_tensor_scale is given
        elif mode == "computed":
            assert torch.equal(actual.per_tensor_scale.cpu(), expected.per_tensor_scale)

    @pytest.mark.parametrize("group_size", [16, 64, 256])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_rotated_weights_equal_the_cpu(self, group_size, dtype):
        dense = torch.randn(300, 2304, generator=torch.Generator().manual_seed(2)).to(dtype)
        options = {"group_size": group_size, "compute_per_tensor_scale": True}
        expected = ConvRotNVFP4Tensor.from_hp(dense, **options)
        actual = ConvRotNVFP4Tensor.from_hp(dense.cuda(), **options)
        assert (actual.qdata.cpu() != expected.qdata).double().mean() < 0.002
        assert (as_bytes(actual.scale) != as_bytes(expected.scale)).double().mean() < 0.002
        torch.testing.assert_close(
            actual.per_tensor_scale.cpu(), expected.per_tensor_scale, rtol=2e-6, atol=0
        )

    def test_non_finite_sources_are_refused(self):
        dense = torch.ones(5, 64, device="cuda")
        dense[4, 63] = torch.nan
        with pytest.raises(ValueError, match=r"non-finite amax \(nan\)"):
            ConvRotNVFP4Tensor.from_hp(dense, group_size=64, compute_per_tensor_scale=True)

    def test_memory_is_bounded_by_the_result(self):
        dense = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        options = {"group_size": 64, "compute_per_tensor_scale": True}
        ConvRotNVFP4Tensor.from_hp(dense, **options)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        weight = ConvRotNVFP4Tensor.from_hp(dense, **options)
        taken = weight.qdata.nbytes + weight.scale.nbytes
        assert torch.cuda.max_memory_allocated() - before <= taken + (1 << 16)

    def test_a_given_scale_is_capturable(self):
        dense = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
        level = torch.tensor(0.001, device="cuda")

        def quantize():
            return ConvRotNVFP4Tensor.from_hp(dense, group_size=256, per_tensor_scale=level)

        expected = quantize()  # compiles the kernel
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = quantize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured.qdata, expected.qdata)
        assert torch.equal(as_bytes(captured.scale), as_bytes(expected.scale))

    def test_from_hp_compiles(self):
        dense = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)

        def quantize(source):
            weight = ConvRotNVFP4Tensor.from_hp(
                source, group_size=256, compute_per_tensor_scale=True, is_swizzled_scales=True
            )
            return weight.qdata, weight.scale.view(torch.uint8), weight.per_tensor_scale

        actual = torch.compile(quantize, backend="aot_eager", fullgraph=True)(dense)
        assert all(torch.equal(a, b) for a, b in zip(actual, quantize(dense), strict=True))

    def test_failures_are_not_retried(self, monkeypatch):
        from piper_kernels.weights.nvfp4 import quantize_triton

        def fail(*_operands):
            raise RuntimeError("the kernel failed")

        monkeypatch.setattr(quantize_triton, "quantize", fail)
        with pytest.raises(RuntimeError, match="the kernel failed"):
            PiperNVFP4Tensor.from_hp(torch.ones(3, 16, device="cuda"))

    def test_offsets_beyond_int32(self, large_device_memory):
        rows, features = 80_000, 28_672
        dense = torch.zeros(rows, features, dtype=torch.bfloat16, device="cuda")
        tail = torch.randn(128, features, generator=torch.Generator().manual_seed(3)).bfloat16()
        dense[-128:] = tail.cuda()
        weight = PiperNVFP4Tensor.from_hp(
            dense, compute_per_tensor_scale=True, is_swizzled_scales=True
        )
        expected, scale, level = _quantize_reference.quantize_two_level(tail, 0, True)
        assert torch.equal(weight.per_tensor_scale.cpu(), level)
        assert torch.equal(weight.qdata[-128:].cpu(), expected)
        assert torch.equal(as_bytes(weight.scale[-32:]), as_bytes(scale))
        assert not weight.qdata[:-128].any()
