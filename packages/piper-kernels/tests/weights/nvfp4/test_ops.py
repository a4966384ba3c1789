import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import (
    PiperNVFP4Tensor,
    _backend,
    _ops,
    _quantize_reference,
    _update_reference,
)

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opcheck_of_quantization(dtype):
    source, stack = torch.randn(7, 64, dtype=dtype), torch.randn(2, 128, 48, dtype=dtype)
    level = torch.tensor(0.01)
    for operands in ((source, None, 16, True), (source.t()[:48].t(), level, 0, False)):
        torch.library.opcheck(_ops.quantize, operands, test_utils=CHECKS)
    torch.library.opcheck(_ops.quantize, (stack, level.expand(2, 1, 1), 0, True), test_utils=CHECKS)
    for operands in ((source, 64, False), (stack, 0, True)):
        torch.library.opcheck(_ops.quantize_two_level, operands, test_utils=CHECKS)


def test_only_the_storage_is_written():
    update, factors = torch.randn(7, 64), (torch.randn(7, 3), torch.randn(3, 64))
    before = [part.clone() for part in (update, *factors)]
    ops.nvfp4_quantize(update, None, 16, True)
    ops.nvfp4_quantize_two_level(update, 16, True)
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
    monkeypatch.setattr(_backend, "select_quantizer", refuse)
    with FakeTensorMode():
        qdata = torch.empty(128, 32, dtype=torch.uint8, device="cuda")
        scale = torch.empty(32, 16, dtype=torch.float8_e4m3fn, device="cuda")
        update = torch.empty(128, 64, device="cuda")
        assert ops.nvfp4_add_(qdata, scale, None, update, 0, 1.0, True, False) is None
        weight = ConvRotNVFP4Tensor.from_hp(
            update, group_size=64, compute_per_tensor_scale=True, is_swizzled_scales=True
        )
        assert (weight.qdata.shape, weight.qdata.dtype) == (qdata.shape, torch.uint8)
        assert (weight.scale.shape, weight.scale.dtype) == (scale.shape, scale.dtype)
        assert (weight.per_tensor_scale.shape, weight.device.type) == ((), "cuda")
        stack = torch.empty(3, 128, 48, device="cuda")
        level = torch.empty(3, 1, 1, device="cuda")
        weight = PiperNVFP4Tensor.from_hp(stack, per_tensor_scale=level, is_swizzled_scales=True)
        assert (weight.qdata.shape, weight.scale.shape) == ((3, 128, 24), (3, 32, 16))
        assert weight.per_tensor_scale is level


def choose_quantizer(rows=2):
    with FakeTensorMode():
        return _backend.select_quantizer(torch.empty(rows, 16, device="cuda"))


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
        assert (choose_quantizer() is not _quantize_reference) is fused
        assert choose_quantizer(rows=0) is _quantize_reference
    monkeypatch.setattr(_backend, "supports_device", lambda device: False)
    assert _backend.select_executor(torch.device("cuda")) is _update_reference
    assert choose_quantizer() is _quantize_reference


@pytest.fixture
def through_operators(monkeypatch):
    """Make weights on the CPU use the operators, as those on accelerators do."""
    monkeypatch.setattr(_backend, "runs_in_operators", lambda device: True)


@pytest.mark.parametrize("mode", ["none", "given", "computed"])
@pytest.mark.parametrize("group_size", [0, 16])
@pytest.mark.parametrize("compiled", [False, True])
def test_from_hp_through_operators(through_operators, mode, group_size, compiled):
    cls = ConvRotNVFP4Tensor if group_size else PiperNVFP4Tensor
    options = {"group_size": group_size} if group_size else {}
    level = torch.tensor(0.01) if mode == "given" else None

    def quantize(source):
        weight = cls.from_hp(
            source,
            per_tensor_scale=level,
            compute_per_tensor_scale=mode == "computed",
            is_swizzled_scales=True,
            **options,
        )
        return weight.qdata, weight.scale.view(torch.uint8), weight.per_tensor_scale

    source = torch.randn(7, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()
    if compiled:
        quantize = torch.compile(quantize, backend="aot_eager", fullgraph=True)
    actual = quantize(source)
    if mode == "computed":
        expected = _quantize_reference.quantize_two_level(source.detach(), group_size, True)
    else:
        expected = *_quantize_reference.quantize(source.detach(), level, group_size, True), level
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1].view(torch.uint8))
    assert (actual[2] is None) if level is None and mode == "none" else actual[2] == expected[2]
    assert not any(part.requires_grad for part in actual if part is not None)


def test_operators_raise_for_a_non_finite_amax(through_operators):
    source = torch.ones(3, 32)
    source[1, 1] = torch.nan
    quantize = torch.compile(
        lambda dense: PiperNVFP4Tensor.from_hp(dense, compute_per_tensor_scale=True).qdata,
        backend="aot_eager",
        fullgraph=True,
    )
    quantize(torch.ones(3, 32))
    for run in (quantize, lambda dense: ops.nvfp4_quantize_two_level(dense, 16, False)):
        with pytest.raises(ValueError, match=r"non-finite amax \(nan\)"):
            run(source)


@pytest.mark.parametrize("two_level", [False, True])
def test_empty_sources(through_operators, two_level):
    weight = PiperNVFP4Tensor.from_hp(
        torch.empty(0, 64), compute_per_tensor_scale=two_level, is_swizzled_scales=True
    )
    assert (weight.qdata.shape, weight.scale.shape) == ((0, 32), (0, 16))
    if two_level:
        assert weight.per_tensor_scale.item() == 2.0**-120
