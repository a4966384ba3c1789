import pytest
import torch

from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor, _backend, _update_reference
from piper_kernels.weights.nvfp4._encoding import decode_codes

FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def randn(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(rows=7, features=256, group_size=0, dtype=torch.float32, **options):
    options = {"compute_per_tensor_scale": True, "is_swizzled_scales": True, **options}
    dense = randn(rows, features, dtype=dtype)
    if group_size:
        return ConvRotNVFP4Tensor.from_hp(dense, group_size=group_size, **options)
    return PiperNVFP4Tensor.from_hp(dense, **options)


def rotated(values, group_size):
    return rotate_groups(values, group_size) if group_size else values


def merge(weight, update, alpha=1.0, beta=1.0):
    """The merge in float64 and in the stored basis, quantized like a new plain weight."""
    group_size = getattr(weight, "group_size", 0)
    stored = rotated(weight.dequantize(torch.float32).double(), group_size)
    merged = beta * stored + alpha * rotated(update.double(), group_size)
    return PiperNVFP4Tensor.from_hp(
        merged.float(),
        compute_per_tensor_scale=weight.per_tensor_scale is not None,
        is_swizzled_scales=weight.is_swizzled_scales,
    )


def assert_matches(weight, expected):
    # FP32 summation order may move a value across a rounding boundary.
    codes, expected_codes = decode_codes(weight.qdata), decode_codes(expected.qdata)
    assert (codes != expected_codes).double().mean() < 0.015
    if expected.per_tensor_scale is not None:
        torch.testing.assert_close(
            weight.per_tensor_scale, expected.per_tensor_scale, rtol=1e-5, atol=0
        )
    torch.testing.assert_close(weight.get_hp_scales(), expected.get_hp_scales(), rtol=0.13, atol=0)
    stored = rotated(weight.dequantize(torch.float32), getattr(weight, "group_size", 0))
    error = (stored - expected.dequantize(torch.float32)).norm() / expected.dequantize().norm()
    assert error < 0.035


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group_size", [0, 16, 64, 256])
@pytest.mark.parametrize("alpha", [1, -0.5])
def test_add_is_the_quantized_logical_merge(dtype, group_size, alpha):
    weight = make(group_size=group_size, dtype=dtype)
    update = randn(7, 256, seed=2, dtype=dtype)
    expected = merge(weight, update, alpha)
    assert weight.add_(update, alpha=alpha) is weight
    assert_matches(weight, expected)


@pytest.mark.parametrize("group_size", [0, 64])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (1, 0.25), (0.5, -2), (0, 1), (2, 0)])
def test_addmm_is_the_quantized_logical_merge(dtype, group_size, beta, alpha):
    weight = make(group_size=group_size, dtype=dtype)
    mat1, mat2 = randn(7, 3, seed=2, dtype=dtype), randn(3, 256, seed=3, dtype=dtype)
    expected = merge(weight, mat1.double() @ mat2.double(), alpha, beta)
    assert weight.addmm_(mat1, mat2, beta=beta, alpha=alpha) is weight
    assert_matches(weight, expected)


@pytest.mark.parametrize("rounding_seed", [None, 5])
def test_layouts_hold_the_same_update(make_weight, plain, rounding_seed):
    weight = make_weight(130, 80, act_per_tensor_scale=torch.tensor(0.5))
    names = weight.__tensor_flatten__()[0]
    inner = [getattr(weight, name) for name in names]
    options = {"name": "convrot"} if hasattr(weight, "group_size") else {}
    canonical = plain(130, 80, two_level=weight.per_tensor_scale is not None, **options)
    update, mat1, mat2 = randn(130, 80), randn(130, 2, seed=2), randn(2, 80, seed=3)
    for target in (weight, canonical):
        target.add_(update, alpha=0.1, rounding_seed=rounding_seed)
        target.addmm_(mat1, mat2, beta=0.5, rounding_seed=rounding_seed)
    assert all(getattr(weight, n) is i for n, i in zip(names, inner, strict=True))
    assert weight.act_per_tensor_scale.item() == 0.5
    assert torch.equal(weight.dequantize(), canonical.dequantize())
    assert not torch.equal(weight.dequantize(), make_weight(130, 80).dequantize())
    if weight.is_swizzled_scales:
        padding = PiperNVFP4Tensor.from_hp(torch.zeros(130, 80), is_swizzled_scales=True)
        unused = padding.scale.view(torch.uint8) == 0
        assert (weight.scale.view(torch.uint8)[unused] == 0).all()


@pytest.mark.parametrize("level", [(), (1, 1, 1)])
def test_global_scale_follows_the_merge(level):
    weight = make()
    weight.per_tensor_scale = weight.per_tensor_scale.reshape(level)
    weight.addmm_(torch.ones(7, 1), torch.full((1, 256), 100.0), beta=0)
    assert weight.per_tensor_scale.shape == level
    assert weight.per_tensor_scale.item() == pytest.approx(100 / 2688)
    torch.testing.assert_close(weight.dequantize(), torch.full((7, 256), 100.0))
    weight.addmm_(torch.ones(7, 1), torch.zeros(1, 256), beta=0)
    assert weight.per_tensor_scale.item() == 2.0**-120
    assert torch.equal(weight.dequantize(), torch.zeros(7, 256))


def test_beta_zero_does_not_read_the_base():
    for weight in (make(), make(group_size=64), make(compute_per_tensor_scale=False)):
        weight.scale.view(torch.uint8).fill_(0x7F)
        weight.addmm_(torch.ones(7, 1), torch.ones(1, 256), beta=0)
        torch.testing.assert_close(weight.dequantize(), torch.ones(7, 256), rtol=0.2, atol=0.2)


def test_no_operation_writes_nothing():
    weight = make()
    inner = (weight.qdata, weight.scale, weight.per_tensor_scale)
    versions = [tensor._version for tensor in inner]
    weight.add_(torch.ones(7, 256), alpha=0)
    weight.addmm_(torch.ones(7, 1), torch.ones(1, 256), alpha=0)
    assert [tensor._version for tensor in inner] == versions
    weight.add_(torch.ones(7, 256))
    assert all(t._version > v for t, v in zip(inner, versions, strict=True))


def test_rank_zero_and_strided_operands():
    reference, strided = make(), make()
    base = reference.dequantize()
    reference.addmm_(torch.zeros(7, 0), torch.zeros(0, 256))
    # Values are those of a fixed point; the codes of tied scales may differ.
    torch.testing.assert_close(reference.dequantize(), base, rtol=0.2, atol=0.05)
    reference = make()
    mat1, mat2 = randn(3, 7).t(), randn(256, 6, seed=2).t()[::2]
    reference.addmm_(mat1.contiguous(), mat2.contiguous())
    strided.addmm_(mat1, mat2)
    assert torch.equal(reference.qdata, strided.qdata)
    update = randn(256, 7).t()
    reference.add_(update.contiguous())
    strided.add_(update)
    assert torch.equal(reference.qdata, strided.qdata)


def test_small_updates_survive_stochastic_rounding_only():
    weights = [make(64, 256, compute_per_tensor_scale=False) for _ in range(2)]
    before = weights[0].dequantize()
    update = torch.full((64, 256), 0.003)
    for step in range(40):
        weights[0].add_(update)
        weights[1].add_(update, rounding_seed=step)
    lost = (weights[0].dequantize() - before).mean().item()
    kept = (weights[1].dequantize() - before).mean().item()
    assert abs(lost - 0.12) > 0.05
    assert kept == pytest.approx(0.12, abs=0.03)


def test_stochastic_updates_are_unbiased():
    weight = PiperNVFP4Tensor.from_hp(torch.zeros(256, 256))
    update = torch.full((256, 256), 1.25)
    update[:, ::16] = 6.0
    weight.add_(update, rounding_seed=3)
    values = weight.dequantize()
    interior = torch.ones(256, dtype=torch.bool)
    interior[::16] = False
    assert values[:, ~interior].unique().tolist() == [6.0]
    assert set(values[:, interior].unique().tolist()) == {1.0, 1.5}
    assert values[:, interior].mean().item() == pytest.approx(1.25, abs=0.005)


@pytest.mark.parametrize("seed", [0, 7, 2**63, 2**64 - 1])
def test_seeds_replay_and_leave_the_global_generator_alone(seed):
    weights = [make(group_size=64) for _ in range(2)]
    update = randn(7, 256, seed=4) * 0.01
    state = torch.get_rng_state()
    for weight in weights:
        weight.add_(update, rounding_seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weights[0].qdata, weights[1].qdata)
    other, nearest = make(group_size=64), make(group_size=64)
    other.add_(update, rounding_seed=2**64 - 2)
    nearest.add_(update)
    assert not torch.equal(weights[0].qdata, other.qdata)
    assert torch.equal(nearest.get_hp_scales(), weights[0].get_hp_scales())


def test_aten_operators_reach_the_methods(make_weight):
    expected, actual = make_weight(), make_weight()
    update, mat1, mat2 = randn(7, 64), randn(7, 2), randn(2, 64)
    expected.add_(update, alpha=0.5)
    expected.addmm_(mat1, mat2, beta=0.5, alpha=2)
    assert torch.ops.aten.add_.Tensor(actual, update, alpha=0.5) is actual
    assert torch.ops.aten.addmm_.default(actual, mat1, mat2, beta=0.5, alpha=2) is actual
    assert torch.equal(actual.qdata, expected.qdata)
    assert torch.equal(actual.dequantize(), expected.dequantize())


def test_updates_work_in_inference_mode_and_under_autocast():
    expected, actual = make(group_size=16), make(group_size=16)
    mat1, mat2 = randn(7, 3), randn(3, 256, seed=2)
    expected.addmm_(mat1, mat2)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        actual.addmm_(mat1, mat2)
    assert torch.equal(actual.qdata, expected.qdata)


def test_updates_compile(plain):
    def update(weight, mat1, mat2, dense):
        weight.addmm_(mat1, mat2, alpha=0.5)
        weight.add_(dense, alpha=2)
        return weight.dequantize()

    operands = (randn(7, 2), randn(2, 64), randn(7, 64))
    for options in ({}, {"name": "convrot", "swizzled": True, "high_first": True}):
        eager, compiled = plain(**options), plain(**options)
        expected = update(eager, *operands)
        actual = torch.compile(update, backend="aot_eager", fullgraph=True)(compiled, *operands)
        assert torch.equal(actual, expected)
        assert torch.equal(compiled.qdata, eager.qdata)


def test_selected_backend_gets_the_operands_and_is_not_retried(monkeypatch):
    calls = []

    class Backend:
        @staticmethod
        def add_(*arguments):
            calls.append(arguments)
            raise RuntimeError("launch failed")

        @staticmethod
        def addmm_(*arguments):
            calls.append(arguments)
            _update_reference.addmm_(*arguments)

    monkeypatch.setattr(_backend, "select", lambda device: Backend)
    weight = make(group_size=64)
    update, mat1, mat2 = torch.ones(7, 256), torch.ones(7, 2), torch.ones(2, 256)
    with pytest.raises(RuntimeError, match="launch failed"):
        weight.add_(update, alpha=2, rounding_seed=2**64 - 1)
    qdata, scale, level, passed, *rest = calls[0]
    assert (qdata, scale, level) == (weight.qdata, weight.scale, weight.per_tensor_scale)
    assert torch.equal(passed, update)
    assert rest == [64, 2.0, True, False, -1]
    plain_weight = make()
    plain_weight.addmm_(mat1, mat2, beta=0.5)
    assert calls[1][5:] == (0, 0.5, 1.0, True, False, None)
    assert len(calls) == 2
