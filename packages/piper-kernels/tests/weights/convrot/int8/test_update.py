import pytest
import torch

from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor, _update
from piper_kernels.weights.convrot.int8._quantization import dynamic_quantize_rows

FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def make(rows=7, features=64, dtype=torch.float32, group_size=16, act=None):
    dense = torch.randn(rows, features, generator=torch.Generator().manual_seed(1)).to(dtype)
    return ConvRotInt8Tensor.from_hp(dense, group_size=group_size, act_per_tensor_scale=act)


def merge_in_rotated_basis(weight, logical_update, alpha, beta=1.0):
    """The FP32 merge in float64, rounded to FP32 once before quantization."""
    base = weight.qdata.double() * weight.scale.double()
    merged = beta * base + alpha * rotate_groups(logical_update.double(), weight.group_size)
    return dynamic_quantize_rows(merged.float())


def assert_close_storage(weight, codes, scale):
    # FP32 summation order may move a value across a rounding boundary.
    difference = (weight.qdata.int() - codes.int()).abs()
    assert difference.max() <= 1
    assert difference.double().mean() < 0.01
    torch.testing.assert_close(weight.scale, scale, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group_size", [16, 64, 256])
@pytest.mark.parametrize("alpha", [1, -0.5])
def test_add_is_the_quantized_logical_merge(dtype, group_size, alpha):
    weight = make(5, 256, dtype, group_size, torch.tensor(0.5))
    update = torch.randn(5, 256).to(dtype)
    codes, scale = merge_in_rotated_basis(weight, update, alpha)
    inner = (weight.qdata, weight.scale, weight.act_per_tensor_scale)
    assert weight.add_(update, alpha=alpha) is weight
    after = (weight.qdata, weight.scale, weight.act_per_tensor_scale)
    assert all(a is b for a, b in zip(after, inner, strict=True))
    assert weight.act_per_tensor_scale.item() == 0.5
    assert_close_storage(weight, codes, scale)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (1, 0.25), (0.5, -2), (0, 1), (2, 0)])
def test_addmm_is_the_quantized_logical_merge(dtype, beta, alpha):
    weight = make(7, 64, dtype)
    mat1, mat2 = torch.randn(7, 3).to(dtype), torch.randn(3, 64).to(dtype)
    codes, scale = merge_in_rotated_basis(weight, mat1.double() @ mat2.double(), alpha, beta)
    qdata, scales = weight.qdata, weight.scale
    assert weight.addmm_(mat1, mat2, beta=beta, alpha=alpha) is weight
    assert weight.qdata is qdata
    assert weight.scale is scales
    assert_close_storage(weight, codes, scale)


def test_lora_merge_keeps_the_rotation_and_row_scales():
    dense = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    dense[:, 5] *= 40  # a channel outlier, which the rotation spreads
    lora_b, lora_a = torch.randn(64, 4) * 0.05, torch.randn(4, 256) * 0.05
    merged = dense + lora_b @ lora_a
    weight = ConvRotInt8Tensor.from_hp(dense, group_size=256)
    weight.addmm_(lora_b, lora_a)
    plain_scale = merged.abs().max() / 127
    plain = (merged / plain_scale).round() * plain_scale
    rotated_error = (weight.dequantize() - merged).norm()
    assert weight.scale.shape == (64, 1)
    assert rotated_error * 5 < (plain - merged).norm()


def test_rank_zero_and_strided_operands():
    weight = make()
    before = weight.qdata.clone()
    weight.addmm_(torch.zeros(7, 0), torch.zeros(0, 64))
    assert torch.equal(weight.qdata, before)
    other, strided = make(), make()
    mat1, mat2 = torch.randn(3, 7).t(), torch.randn(64, 6).t()[::2]
    other.addmm_(mat1.contiguous(), mat2.contiguous())
    strided.addmm_(mat1, mat2)
    assert torch.equal(other.qdata, strided.qdata)
    update = torch.randn(64, 7).t()
    other.add_(update.contiguous())
    strided.add_(update)
    assert torch.equal(other.qdata, strided.qdata)


def test_beta_zero_does_not_read_the_base():
    weight = make()
    weight.scale.fill_(torch.nan)
    weight.addmm_(torch.ones(7, 1), torch.ones(1, 64), beta=0)
    assert torch.isfinite(weight.dequantize()).all()
    torch.testing.assert_close(weight.dequantize(), torch.ones(7, 64), rtol=0.02, atol=0.02)


def test_no_operation_writes_nothing():
    weight = make()
    versions = (weight.qdata._version, weight.scale._version)
    weight.add_(torch.ones(7, 64), alpha=0)
    weight.addmm_(torch.ones(7, 1), torch.ones(1, 64), alpha=0)
    assert (weight.qdata._version, weight.scale._version) == versions
    weight.add_(torch.ones(7, 64))
    assert weight.qdata._version > versions[0]
    assert weight.scale._version > versions[1]


def test_aten_operators_reach_the_methods():
    expected, actual = make(), make()
    update, mat1, mat2 = torch.randn(7, 64), torch.randn(7, 2), torch.randn(2, 64)
    expected.add_(update, alpha=0.5)
    expected.addmm_(mat1, mat2, beta=0.5, alpha=2)
    assert torch.ops.aten.add_.Tensor(actual, update, alpha=0.5) is actual
    assert torch.ops.aten.addmm_.default(actual, mat1, mat2, beta=0.5, alpha=2) is actual
    assert torch.equal(actual.qdata, expected.qdata)
    assert torch.equal(actual.scale, expected.scale)


@pytest.mark.parametrize("seed", [0, 7, 2**63, 2**64 - 1])
def test_seeds_replay_and_leave_the_global_generator_alone(seed):
    weights = [make() for _ in range(2)]
    update = torch.randn(7, 64) * 0.01
    state = torch.get_rng_state()
    for weight in weights:
        weight.add_(update, rounding_seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weights[0].qdata, weights[1].qdata)
    other = make()
    other.add_(update, rounding_seed=2**64 - 2)
    assert not torch.equal(weights[0].qdata, other.qdata)
    nearest = make()
    nearest.add_(update)
    assert torch.equal(nearest.scale, weights[0].scale)


def test_stochastic_updates_are_unbiased():
    rows = torch.full((256, 256), 0.5)
    rows[:, -1] = 1.0
    update = rotate_groups(rows, 256)
    weight = ConvRotInt8Tensor.from_hp(torch.zeros(256, 256), group_size=256)
    weight.add_(update, rounding_seed=3)
    codes = weight.qdata
    assert codes[:, -1].unique().tolist() == [127]
    assert codes[:, :-1].double().mean().item() == pytest.approx(63.5, abs=0.01)
    assert set(codes[:, :-1].unique().tolist()) <= {63, 64}


@pytest.mark.parametrize("seed", [True, 1.5, "7"])
def test_seed_types(seed):
    weight = make()
    for update in updates(weight):
        with pytest.raises(TypeError, match="unsigned 64-bit integer"):
            update(rounding_seed=seed)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_range_is_checked_before_writing(seed):
    weight = make()
    version = weight.qdata._version
    for update in updates(weight):
        with pytest.raises(ValueError, match="unsigned 64-bit integer"):
            update(rounding_seed=seed)
    assert weight.qdata._version == version


def updates(weight):
    return (
        lambda **options: weight.add_(torch.ones(7, 64), **options),
        lambda **options: weight.addmm_(torch.ones(7, 2), torch.ones(2, 64), **options),
    )


@pytest.mark.parametrize(
    ("operand", "error", "match"),
    [
        (torch.ones(7, 65), ValueError, "shape mismatch"),
        (torch.ones(8, 64), ValueError, "shape mismatch"),
        (torch.ones(64), ValueError, "matrices must be 2-D"),
        (torch.ones(1, 7, 64), ValueError, "matrices must be 2-D"),
        (torch.ones(7, 64, dtype=torch.float16), ValueError, "logical dtype"),
        (torch.ones(7, 64, device="meta"), ValueError, "share a device"),
        (torch.ones(7, 64).to_sparse(), ValueError, "strided layout"),
        (torch.ones(7, 64, requires_grad=True), RuntimeError, "does not support autograd"),
        (1.0, TypeError, "must be a tensor"),
    ],
)
def test_add_operand_refusals(operand, error, match):
    with pytest.raises(error, match=match):
        make().add_(operand)


@pytest.mark.parametrize(
    ("mat1", "mat2", "match"),
    [
        (torch.ones(8, 2), torch.ones(2, 64), "mat1 shape mismatch"),
        (torch.ones(7, 2), torch.ones(3, 64), "mat2 shape mismatch"),
        (torch.ones(7, 2), torch.ones(2, 32), "mat2 shape mismatch"),
        (torch.ones(7), torch.ones(1, 64), "matrices must be 2-D"),
        (torch.ones(7, 2).half(), torch.ones(2, 64), "mat1 must have the weight's logical dtype"),
        (torch.ones(7, 2), torch.ones(2, 64).half(), "mat2 must have the weight's logical dtype"),
    ],
)
def test_addmm_operand_refusals(mat1, mat2, match):
    with pytest.raises(ValueError, match=match):
        make().addmm_(mat1, mat2)


@pytest.mark.parametrize("scalar", [1j, None, "1"])
def test_scalar_types(scalar):
    for update in updates(make()):
        with pytest.raises(TypeError, match="alpha must be a real number"):
            update(alpha=scalar)


@pytest.mark.parametrize("scalar", [float("nan"), float("inf")])
def test_scalars_are_finite(scalar):
    for update in updates(make()):
        with pytest.raises(ValueError, match="alpha must be finite"):
            update(alpha=scalar)
    with pytest.raises(ValueError, match="beta must be finite"):
        make().addmm_(torch.ones(7, 2), torch.ones(2, 64), beta=scalar)


def test_autograd_is_refused_only_while_enabled():
    weight = make()
    mat1 = torch.ones(7, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="does not support autograd"):
        weight.addmm_(mat1, torch.ones(2, 64))
    with torch.no_grad():
        weight.addmm_(mat1, torch.ones(2, 64))
    weight.scale.requires_grad_()
    with pytest.raises(RuntimeError, match="does not support autograd"):
        weight.add_(torch.ones(7, 64))


def test_unsupported_weights():
    with pytest.raises(NotImplementedError, match="transposed=True"):
        make().t().add_(torch.ones(64, 7))
    conv = ConvRotInt8Tensor.from_hp(torch.randn(2, 64, 3, 3, 3), group_size=16)
    with pytest.raises(NotImplementedError, match="2-D ConvRotInt8Tensor"):
        conv.add_(torch.ones(2, 64, 3, 3, 3))
    options = {"group_size": 16, "logical_dtype": torch.float32, "alpha": 1, "rounding_seed": None}
    with pytest.raises(ValueError, match="requires 2-D qdata"):
        _update.add_(conv.qdata, conv.scale, torch.ones(2, 64), **options)
    with pytest.raises(ValueError, match="meta device"):
        make().to("meta").add_(torch.ones(7, 64, device="meta"))
    strided = make()
    strided.qdata = torch.zeros(7, 128, dtype=torch.int8)[:, ::2]
    with pytest.raises(ValueError, match="qdata and scale must be contiguous"):
        strided.add_(torch.ones(7, 64))


def test_autocast_does_not_change_updates():
    mat1, mat2 = torch.randn(7, 3), torch.randn(3, 64)
    expected, actual = make(), make()
    expected.addmm_(mat1, mat2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual.addmm_(mat1, mat2)
    assert torch.equal(actual.qdata, expected.qdata)
    assert torch.equal(actual.scale, expected.scale)
