import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor, _backend, _ops, _update_reference

ops = torch.ops.piper_kernels

# The schema check compares tensors with operations that float8 lacks on the CPU;
# ``test_only_the_storage_is_written`` makes up for it.
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def storage(two_level=True, swizzled=True):
    dense = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    weight = PiperNVFP4Tensor.from_hp(
        dense, compute_per_tensor_scale=two_level, is_swizzled_scales=swizzled
    )
    return weight.qdata, weight.scale, weight.per_tensor_scale


@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("seed", [None, -1])
def test_opcheck(two_level, seed):
    factors = torch.randn(7, 3), torch.randn(3, 64)
    for swizzled, high_first in ((False, True), (True, False)):
        parts = storage(two_level, swizzled)
        layout = (swizzled, high_first, seed)
        update = torch.randn(7, 64)
        torch.library.opcheck(_ops.add_, (*parts, update, 16, 0.5, *layout), test_utils=CHECKS)
        torch.library.opcheck(
            _ops.addmm_, (*parts, *factors, 0, 0.5, 2.0, *layout), test_utils=CHECKS
        )


def test_only_the_storage_is_written():
    update, factors = torch.randn(7, 64), (torch.randn(7, 3), torch.randn(3, 64))
    before = [part.clone() for part in (update, *factors)]
    ops.nvfp4_add_(*storage(), update, 16, 0.5, True, False)
    ops.nvfp4_addmm_(*storage(), *factors, 0, 0.5, 2.0, True, False)
    assert all(torch.equal(a, b) for a, b in zip((update, *factors), before, strict=True))


def test_schemas():
    assert str(ops.nvfp4_add_.default._schema) == (
        "piper_kernels::nvfp4_add_(Tensor(a0!) qdata, Tensor(a1!) scale, Tensor(a2!)? "
        "per_tensor_scale, Tensor update, SymInt group_size, float alpha, bool swizzled, "
        "bool high_first, SymInt? rounding_seed=None) -> ()"
    )
    assert str(ops.nvfp4_addmm_.default._schema) == (
        "piper_kernels::nvfp4_addmm_(Tensor(a0!) qdata, Tensor(a1!) scale, Tensor(a2!)? "
        "per_tensor_scale, Tensor mat1, Tensor mat2, SymInt group_size, float beta, float alpha, "
        "bool swizzled, bool high_first, SymInt? rounding_seed=None) -> ()"
    )


def test_operators_equal_the_reference_and_bump_versions():
    update, factors = torch.randn(7, 64), (torch.randn(7, 2), torch.randn(2, 64))
    expected, actual = storage(), storage()
    versions = [part._version for part in actual]
    _update_reference.add_(*expected, update, 16, 0.5, True, False, -1)
    _update_reference.addmm_(*expected, *factors, 16, 0.5, 2.0, True, False)
    ops.nvfp4_add_(*actual, update, 16, 0.5, True, False, -1)
    ops.nvfp4_addmm_(*actual, *factors, 16, 0.5, 2.0, True, False)
    for first, second in zip(actual, expected, strict=True):
        assert torch.equal(first.float(), second.float())
    assert all(p._version > v for p, v in zip(actual, versions, strict=True))


def test_fakes_select_nothing(monkeypatch):
    def refuse(*_):
        raise AssertionError("a fake asked for a backend")

    monkeypatch.setattr(_backend, "select_executor", refuse)
    with FakeTensorMode():
        qdata = torch.empty(128, 32, dtype=torch.uint8, device="cuda")
        scale = torch.empty(32, 16, dtype=torch.float8_e4m3fn, device="cuda")
        update = torch.empty(128, 64, device="cuda")
        assert ops.nvfp4_add_(qdata, scale, None, update, 0, 1.0, True, False) is None


def test_choice_by_device(monkeypatch):
    assert _backend.select(torch.device("cpu")) is None
    assert _backend.select(torch.device("meta")) is None
    assert _backend.select(torch.device("cuda")) is _ops
    assert _backend.select_executor(torch.device("cpu")) is _update_reference
    monkeypatch.setattr(_backend, "supports_device", lambda device: True)
    for target, fused in (
        (AcceleratorTarget("cuda", "sm_75"), False),
        (AcceleratorTarget("cuda", "sm_80"), True),
        (AcceleratorTarget("cuda", "sm_90"), True),
        (AcceleratorTarget("hip", "gfx1201"), True),
    ):
        monkeypatch.setattr(_backend, "accelerator_target", lambda device, t=target: t)
        if fused:
            pytest.importorskip("triton", reason="Triton is not installed")
        chosen = _backend.select_executor(torch.device("cuda"))
        assert (chosen is not _update_reference) is fused
    monkeypatch.setattr(_backend, "supports_device", lambda device: False)
    assert _backend.select_executor(torch.device("cuda")) is _update_reference
