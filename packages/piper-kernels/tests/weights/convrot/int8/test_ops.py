import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from piper_kernels.weights.convrot.int8 import (
    ConvRotInt8Tensor,
    _backend,
    _ops,
    _update,
    _update_reference,
)

ops = torch.ops.piper_kernels


def make(rows=7, features=64):
    dense = torch.randn(rows, features, generator=torch.Generator().manual_seed(1))
    return ConvRotInt8Tensor.from_hp(dense, group_size=16)


@pytest.mark.parametrize("seed", [None, 7, -1])
def test_opcheck(seed):
    weight = make()
    storage = weight.qdata, weight.scale
    torch.library.opcheck(_ops.add_, (*storage, torch.randn(7, 64), 16, 0.5, seed))
    factors = torch.randn(7, 3), torch.randn(3, 64)
    torch.library.opcheck(_ops.addmm_, (*storage, *factors, 16, 0.5, 2.0, seed))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_opcheck_quantize(dtype):
    for source in (torch.randn(5, 64), torch.randn(64, 5).t(), torch.randn(0, 64)):
        torch.library.opcheck(_ops.quantize_weight, (source.to(dtype), 16))


def test_schemas():
    assert str(ops.convrot_int8_add_.default._schema) == (
        "piper_kernels::convrot_int8_add_(Tensor(a0!) qdata, Tensor(a1!) scale, Tensor update, "
        "SymInt group_size, float alpha, SymInt? rounding_seed=None) -> ()"
    )
    assert str(ops.convrot_int8_addmm_.default._schema) == (
        "piper_kernels::convrot_int8_addmm_(Tensor(a0!) qdata, Tensor(a1!) scale, Tensor mat1, "
        "Tensor mat2, SymInt group_size, float beta, float alpha, SymInt? rounding_seed=None) "
        "-> ()"
    )


def test_operators_equal_the_reference_and_bump_versions():
    expected, actual = make(), make()
    update, mat1, mat2 = torch.randn(7, 64), torch.randn(7, 2), torch.randn(2, 64)
    _update_reference.add_(expected.qdata, expected.scale, update, 16, 0.5, -1)
    _update_reference.addmm_(expected.qdata, expected.scale, mat1, mat2, 16, 0.5, 2.0)
    versions = actual.qdata._version, actual.scale._version
    ops.convrot_int8_add_(actual.qdata, actual.scale, update, 16, 0.5, -1)
    ops.convrot_int8_addmm_(actual.qdata, actual.scale, mat1, mat2, 16, 0.5, 2.0)
    assert torch.equal(actual.qdata, expected.qdata)
    assert torch.equal(actual.scale, expected.scale)
    assert actual.qdata._version > versions[0]
    assert actual.scale._version > versions[1]


def test_fakes_select_no_backend(monkeypatch):
    def refuse(*_):
        raise AssertionError("a fake asked for a backend")

    monkeypatch.setattr(_backend, "select_update_backend", refuse)
    monkeypatch.setattr(_backend, "supports_device", refuse)
    with FakeTensorMode():
        source = torch.empty(7, 64, dtype=torch.bfloat16, device="cuda")
        codes, scale = ops.convrot_int8_quantize_weight(source, 16)
        assert (codes.shape, codes.dtype, codes.device.type) == ((7, 64), torch.int8, "cuda")
        assert (scale.shape, scale.dtype) == ((7, 1), torch.float32)
        assert ops.convrot_int8_add_(codes, scale, source, 16, 1.0) is None
        weight = ConvRotInt8Tensor.from_hp(source, group_size=16)
        weight.addmm_(source[:, :2], source[:2])
        assert weight.dtype == torch.bfloat16


class Recorder:
    """A backend that notes its calls, and fails when told to."""

    def __init__(self, error=None):
        self.calls, self.error = [], error

    def add_(self, *operands):
        self.calls.append(operands[3:])
        if self.error is not None:
            raise self.error

    def addmm_(self, *operands):
        self.calls.append(operands[4:])


@pytest.fixture
def accelerated(monkeypatch):
    """Send CPU weights through the operators to a recording backend."""

    def use(error=None):
        backend = Recorder(error)
        monkeypatch.setattr(_update, "runs_in_operators", lambda device: True)
        monkeypatch.setattr(_backend, "select_update_backend", lambda qdata: backend)
        return backend

    return use


def test_updates_reach_the_backend_with_signed_seeds(accelerated):
    backend, weight = accelerated(), make()
    weight.add_(torch.ones(7, 64), alpha=0.5, rounding_seed=2**64 - 1)
    weight.addmm_(torch.ones(7, 2), torch.ones(2, 64), beta=0.5, alpha=2)
    assert backend.calls == [(16, 0.5, -1), (16, 0.5, 2.0, None)]


def test_no_operation_asks_no_backend(accelerated):
    backend, weight = accelerated(), make()
    versions = weight.qdata._version, weight.scale._version
    weight.add_(torch.ones(7, 64), alpha=0)
    weight.addmm_(torch.ones(7, 2), torch.ones(2, 64), alpha=0)
    assert backend.calls == []
    assert (weight.qdata._version, weight.scale._version) == versions


def test_a_failing_kernel_is_not_retried(accelerated, monkeypatch):
    backend = accelerated(RuntimeError("the kernel failed"))
    monkeypatch.setattr(_update_reference, "add_", None)
    with pytest.raises(RuntimeError, match="the kernel failed"):
        make().add_(torch.ones(7, 64))
    assert len(backend.calls) == 1
