"""Numeric checks of the ConvRot INT8 kernels against the portable reference on the CPU.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import sys

import torch

from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.convrot.int8 import _update_reference, triton
from piper_kernels.weights.convrot.int8._quantization import dynamic_quantize_rows

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference_weight(dense, group_size):
    return dynamic_quantize_rows(rotate_groups(dense.float(), group_size))


def stored(rows, features, group_size, seed=1):
    return reference_weight(normal(rows, features, seed=seed), group_size)


def assert_close(actual, expected, tolerance=2e-6):
    (codes, scale), (expected_codes, expected_scale) = actual, expected
    assert codes.dtype == torch.int8
    torch.testing.assert_close(scale.cpu(), expected_scale, rtol=tolerance, atol=0)
    difference = (codes.cpu().int() - expected_codes.int()).abs()
    assert difference.max() <= 1, difference.max()
    assert difference.double().mean() < 0.01


def check_quantize(shapes) -> None:
    for index, (rows, features, group) in enumerate(shapes):
        dense = normal(rows, features).to(FLOATS[index % 3])
        actual = triton.quantize_weight(dense.to(DEVICE), group)
        assert all(part.is_contiguous() for part in actual)
        assert_close(actual, reference_weight(dense, group))


def check_strided_sources() -> None:
    dense = normal(64, 96)
    expected = reference_weight(dense, 16)
    padded = torch.full((64, 200), torch.nan, device=DEVICE)
    padded[:, 3:99] = dense.to(DEVICE)
    for source in (dense.to(DEVICE).t().contiguous().t(), padded[:, 3:99]):
        assert not source.is_contiguous()
        assert_close(triton.quantize_weight(source, 16), expected)


def check_special_rows() -> None:
    dense = normal(6, 256)
    dense[1] = 0
    dense[2] *= 1e37
    dense[3] *= 1e-36
    dense[4, 7] = torch.nan
    dense[5, 8] = -torch.inf
    codes, scale = (part.cpu() for part in triton.quantize_weight(dense.to(DEVICE), 256))
    expected_codes, expected_scale = reference_weight(dense, 256)
    torch.testing.assert_close(scale, expected_scale, rtol=2e-6, atol=0, equal_nan=True)
    assert (codes[:4].int() - expected_codes[:4].int()).abs().max() <= 1
    assert scale[1].item() == torch.tensor(1e-30).item()
    assert codes[[1, 4, 5]].abs().max() == 0


def check_integers_are_exact() -> None:
    generator = torch.Generator().manual_seed(4)
    dense = torch.randint(-8, 9, (13, 512), generator=generator)
    for group in (16, 64, 256):
        for dtype in FLOATS:
            source = dense.to(dtype)
            codes, scale = triton.quantize_weight(source.to(DEVICE), group)
            expected_codes, expected_scale = reference_weight(source, group)
            assert torch.equal(codes.cpu(), expected_codes)
            assert torch.equal(scale.cpu(), expected_scale)


def updated(function, weight, *operands):
    storage = tuple(part.clone().to(DEVICE) for part in weight)
    moved = (part.to(DEVICE) if isinstance(part, torch.Tensor) else part for part in operands)
    assert function(*storage, *moved) is None
    return storage


def check_add(shapes) -> None:
    for index, (rows, features, group) in enumerate(shapes):
        weight = stored(rows, features, group)
        update = normal(rows, features, seed=2).to(FLOATS[index % 3])
        for alpha in (1.0, -0.5):
            actual = updated(triton.add_, weight, update, group, alpha)
            expected = tuple(part.clone() for part in weight)
            _update_reference.add_(*expected, update, group, alpha)
            assert_close(actual, expected)


def check_addmm(shapes) -> None:
    coefficients = ((1.0, 1.0), (0.5, -2.0), (0.0, 1.0), (2.0, 0.0))
    for index, (rows, features, group, rank) in enumerate(shapes):
        weight = stored(rows, features, group)
        mat1 = normal(rows, rank, seed=3).to(FLOATS[index % 3])
        mat2 = normal(rank, features, seed=4).to(FLOATS[index % 3])
        beta, alpha = coefficients[index % 4]
        actual = updated(triton.addmm_, weight, mat1, mat2, group, beta, alpha)
        expected = tuple(part.clone() for part in weight)
        _update_reference.addmm_(*expected, mat1, mat2, group, beta, alpha)
        assert_close(actual, expected, 2e-5)
        transposed = updated(
            triton.addmm_,
            weight,
            mat1.t().contiguous().t(),
            mat2.t().contiguous().t(),
            group,
            beta,
            alpha,
        )
        assert all(torch.equal(a, b) for a, b in zip(actual, transposed, strict=True))


def check_beta_zero_reads_nothing() -> None:
    codes, scale = stored(5, 64, 16)
    weight = codes, torch.full_like(scale, torch.nan)
    mat1, mat2 = torch.ones(5, 1), torch.ones(1, 64)
    codes, scale = updated(triton.addmm_, weight, mat1, mat2, 16, 0.0, 1.0)
    assert torch.isfinite(scale).all()
    # With alpha == 0 the factors are not read either.
    weight = stored(5, 64, 16)
    actual = updated(triton.addmm_, weight, mat1 * torch.nan, mat2, 16, 2.0, 0.0)
    assert torch.equal(actual[0].cpu(), weight[0])
    torch.testing.assert_close(actual[1].cpu(), 2 * weight[1])


def check_seeds(rows=16, features=256) -> None:
    weight = stored(rows, features, 64)
    update = normal(rows, features, seed=5) * 0.01
    factors = normal(rows, 3, seed=6) * 0.01, normal(3, features, seed=7)
    for function, operands in (
        (triton.add_, (update, 64, 1.0)),
        (triton.addmm_, (*factors, 64, 1.0, 1.0)),
    ):
        state = torch.get_rng_state()
        results = [updated(function, weight, *operands, s) for s in (7, 7, 8, -1, -2, None)]
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(results[0][0], results[1][0])
        for first, second in ((0, 2), (3, 4), (0, 5)):
            assert not torch.equal(results[first][0], results[second][0])
        for codes, scale in results:
            assert torch.equal(scale, results[5][1])
            assert (codes.int() - results[5][0].int()).abs().max() <= 1


def check_stochastic_mean(rows=64, features=256) -> None:
    rotated = torch.full((rows, features), 0.5)
    rotated[:, -1] = 1.0
    update = rotate_groups(rotated, 256)
    weight = torch.zeros(rows, features, dtype=torch.int8), torch.full((rows, 1), 1e-30)
    codes, _ = updated(triton.add_, weight, update, 256, 1.0, 3)
    codes = codes.cpu()
    assert codes[:, -1].unique().tolist() == [127]
    assert set(codes[:, :-1].unique().tolist()) <= {63, 64}
    assert abs(codes[:, :-1].double().mean().item() - 63.5) < 0.02
    # Every row and column has draws of its own.
    assert codes[:, :-1].unique(dim=0).shape[0] == rows


SMALL = [(1, 16, 16), (3, 48, 16), (127, 16, 16), (5, 320, 64), (2, 768, 256), (1, 4352, 256)]
CHUNKED = [(2, 5376, 256), (1, 8192, 64), (3, 14336, 256)]
WIDE = [(2, 49408, 256)]
PRODUCTS = [
    (1, 16, 16, 1), (7, 64, 16, 3), (65, 144, 16, 17), (64, 320, 64, 33), (130, 256, 256, 0),
    (3, 512, 256, 16), (63, 48, 16, 40),
]  # fmt: skip


def main() -> None:
    check_quantize(SMALL + CHUNKED + WIDE)
    check_strided_sources()
    check_special_rows()
    check_integers_are_exact()
    check_add([*SMALL, CHUNKED[0], WIDE[0]])
    check_addmm(PRODUCTS)
    check_beta_zero_reads_nothing()
    check_seeds()
    check_stochastic_mean()


if __name__ == "__main__":
    main()
    print("kernel checks passed")
