import hashlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from piper_kernels.weights.convrot import SUPPORTED_GROUP_SIZES
from piper_kernels.weights.convrot._rotation import build_hadamard, rotate_groups

DIGESTS = {
    16: "9b46fb3c57a096bd73a10d9a089ce835fd22c80fc252f10576658e3f958d72ac",
    64: "42759176f7fc530ed4a0ae8acbfcf1bb3c4f86fc34ab1b89e3e50a4ed44383af",
    256: "de75fba5a830070acfbfec9cf3fba8a70ef4bfc05e9e6e4dc1fa9bb994f3bc5d",
}


def golden_matrix(rows=2):
    """The matrix of the golden vectors: ((7 * i) mod 23) - 11."""
    index = torch.arange(rows * 32).view(rows, 32)
    return ((7 * index) % 23 - 11).to(torch.float32)


def butterfly(value, group_size):
    """Rotate by log4(size) stages of four-point sums, in the dtype of ``value``."""
    stage = value.reshape(-1, group_size)
    stride = 1
    while stride < group_size:
        a, b, c, d = stage.view(-1, group_size // (4 * stride), 4, stride).unbind(2)
        stage = torch.stack((a + b + c - d, a + b - c + d, a - b + c + d, -a + b + c + d), 2)
        stage = stage.reshape(-1, group_size)
        stride *= 4
    return (stage * group_size**-0.5).view(value.shape)


def test_supported_group_sizes():
    assert SUPPORTED_GROUP_SIZES == (16, 64, 256)


@pytest.mark.parametrize("size", SUPPORTED_GROUP_SIZES)
def test_sign_digests(size):
    signs = build_hadamard(size).sign().to(torch.int8)
    assert hashlib.sha256(signs.numpy().tobytes()).hexdigest() == DIGESTS[size]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SUPPORTED_GROUP_SIZES)
def test_matrix_is_symmetric_orthonormal_and_regular(size, dtype):
    matrix = build_hadamard(size, "cpu", dtype)
    assert matrix.dtype == dtype
    assert torch.equal(matrix, matrix.t())
    assert torch.equal(matrix @ matrix, torch.eye(size, dtype=dtype))
    assert torch.equal(matrix.sum(1), torch.ones(size, dtype=dtype))


def test_golden_rotation():
    assert rotate_groups(golden_matrix(), 16)[0].tolist() == [
        -5.25, -9.75, -2.75, 4.25, -0.25, -4.75, 2.25, 9.25,
        -6.75, 11.75, -4.25, 2.75, 9.75, 5.25, -10.75, -3.75,
        3.25, -12.75, 5.75, 1.25, -3.25, 3.75, -0.75, -5.25,
        1.75, 8.75, 4.25, -0.25, 6.75, -9.25, -13.75, 4.75,
    ]  # fmt: skip


@pytest.mark.parametrize("lead", [(), (1,), (3, 5), (0,), (2, 0)])
@pytest.mark.parametrize("size", SUPPORTED_GROUP_SIZES)
def test_equals_the_butterfly_on_integers(size, lead):
    value = torch.randint(-100, 100, (*lead, 3 * size)).to(torch.float32)
    rotated = rotate_groups(value, size)
    assert torch.equal(rotated, butterfly(value, size))
    assert torch.equal(rotate_groups(rotated, size), value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", SUPPORTED_GROUP_SIZES)
def test_close_to_float64_in_every_dtype(size, dtype):
    value = torch.randn(7, 2 * size).to(dtype)
    rotated = rotate_groups(value, size)
    expected = butterfly(value.double(), size)
    error = (rotated.double() - expected).norm() / expected.norm()
    assert rotated.dtype == dtype
    assert error < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("size", SUPPORTED_GROUP_SIZES)
def test_strided_input_is_read_correctly_and_kept(size):
    value = torch.randn(2 * size, 9).t()[::2]
    before = value.clone()
    assert torch.equal(rotate_groups(value, size), rotate_groups(value.contiguous(), size))
    assert torch.equal(value, before)


@pytest.mark.parametrize("size", [0, 1, 32, 128, 1024])
def test_unsupported_group_size(size):
    with pytest.raises(ValueError, match="group size must be one of"):
        build_hadamard(size)
    with pytest.raises(ValueError, match="group size must be one of"):
        rotate_groups(torch.zeros(2, 64), size)


def test_indivisible_features():
    with pytest.raises(ValueError, match="40 is not divisible by group size 16"):
        rotate_groups(torch.zeros(2, 40), 16)


def test_concrete_matrices_are_shared_and_traced_ones_are_not():
    assert build_hadamard(16) is build_hadamard(16)
    assert build_hadamard(16, "meta") is not build_hadamard(16, "meta")
    with FakeTensorMode():
        fake = build_hadamard(64)
        assert isinstance(fake, FakeTensor)
        assert rotate_groups(torch.empty(3, 64), 64).shape == (3, 64)
    assert not isinstance(build_hadamard(64), FakeTensor)


def test_first_use_in_inference_mode_leaves_a_normal_matrix():
    from piper_kernels.weights.convrot import _rotation

    _rotation._cached_hadamard.cache_clear()
    with torch.inference_mode():
        rotate_groups(torch.randn(2, 16), 16)
    value = torch.randn(2, 16, requires_grad=True)
    rotate_groups(value, 16).sum().backward()
    assert value.grad is not None


def test_compiles():
    compiled = torch.compile(rotate_groups, backend="aot_eager", fullgraph=True)
    value = torch.randn(3, 512)
    for size in SUPPORTED_GROUP_SIZES:
        torch.testing.assert_close(compiled(value, size), rotate_groups(value, size))


@pytest.mark.parametrize("size", SUPPORTED_GROUP_SIZES)
def test_autocast_does_not_lower_the_precision(size):
    value = torch.randn(3, 256)
    expected = rotate_groups(value, size)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rotate_groups(value, size), expected)
