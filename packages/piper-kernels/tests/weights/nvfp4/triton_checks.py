"""Numeric checks of the NVFP4 update kernels against the portable reference on the CPU.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import sys
from itertools import product

import torch

from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.nvfp4 import _update_reference, triton
from piper_kernels.weights.nvfp4._encoding import decode, encode, per_tensor_scale_of
from piper_kernels.weights.nvfp4._layout import (
    pack_codes,
    swap_packed_pairs,
    swizzle_scale,
    unswizzle_scale,
)

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Weight:
    """Storage of one weight in one of the eight formats."""

    def __init__(self, rows, features, two_level=True, swizzled=True, high_first=False):
        dense = normal(rows, features, seed=1)
        level = per_tensor_scale_of(dense.abs().amax()) if two_level else None
        codes, scale = encode(dense, level)
        self.shape, self.swizzled, self.high_first = (rows, features), swizzled, high_first
        self.qdata = pack_codes(codes, high_first=high_first)
        self.scale = swizzle_scale(scale) if swizzled else scale
        self.level = level

    def storage(self, device="cpu"):
        return tuple(
            None if part is None else part.clone().to(device)
            for part in (self.qdata, self.scale, self.level)
        )

    def values(self, storage):
        qdata, scale, level = (None if part is None else part.cpu() for part in storage)
        rows, features = self.shape
        if self.swizzled:
            scale = unswizzle_scale(scale, rows, features // 16)
        decoded = scale.float() if level is None else level * scale.float()
        return decode(qdata, decoded, high_first=self.high_first)

    def update(self, function, device, *operands, seed=None):
        storage = self.storage(device)
        moved = (part.to(device) if isinstance(part, torch.Tensor) else part for part in operands)
        result = function(*storage, *moved, self.swizzled, self.high_first, seed)
        assert result is None
        return storage


def assert_same_weight(weight, actual, expected):
    """Compare values: neighbouring codes and scales may differ where FP32 sums do."""
    (_, scale, level), (_, expected_scale, expected_level) = actual, expected
    if level is not None:
        torch.testing.assert_close(level.cpu(), expected_level, rtol=1e-5, atol=0)
    steps = scale.cpu().view(torch.uint8).int() - expected_scale.view(torch.uint8).int()
    assert steps.abs().max() <= 1
    assert (steps != 0).double().mean() < 0.02
    values, wanted = weight.values(actual), weight.values(expected)
    assert (values - wanted).norm() <= 0.02 * wanted.norm() + 1e-30
    # A global scale that is one rounding off moves every value a little.
    other = (values - wanted).abs() > 1e-4 * wanted.abs()
    assert other.double().mean() < 0.03


def check_add(shapes) -> None:
    formats = list(product((False, True), repeat=3))
    for index, (rows, features, group) in enumerate(shapes):
        weight = Weight(rows, features, *formats[index % 8])
        update = normal(rows, features, seed=2).to(FLOATS[index % 3])
        operands = update, group, -0.5
        actual = weight.update(triton.add_, DEVICE, *operands)
        expected = weight.update(_update_reference.add_, "cpu", *operands)
        assert_same_weight(weight, actual, expected)
        strided = weight.update(triton.add_, DEVICE, update.t().contiguous().t(), group, -0.5)
        assert all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in pairs(actual, strided))


def pairs(first, second):
    return [(a, b) for a, b in zip(first, second, strict=True) if a is not None]


def bytes_of(tensor):
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def check_addmm(shapes) -> None:
    formats = list(product((False, True), repeat=3))
    coefficients = ((1.0, 1.0), (0.5, -2.0), (0.0, 1.0), (2.0, 0.0))
    for index, (rows, features, group, rank) in enumerate(shapes):
        weight = Weight(rows, features, *formats[(index + 3) % 8])
        mat1 = normal(rows, rank, seed=3).to(FLOATS[index % 3])
        mat2 = normal(rank, features, seed=4).to(FLOATS[index % 3])
        operands = mat1, mat2, group, *coefficients[index % 4]
        actual = weight.update(triton.addmm_, DEVICE, *operands)
        expected = weight.update(_update_reference.addmm_, "cpu", *operands)
        assert_same_weight(weight, actual, expected)


def check_exact_on_small_integers() -> None:
    # Sums are exact, so every byte must be equal.
    generator = torch.Generator().manual_seed(6)
    for two_level, swizzled, high_first in product((False, True), repeat=3):
        weight = Weight(37, 80, two_level, swizzled, high_first)
        update = torch.randint(-8, 9, (37, 80), generator=generator).float()
        mat1 = torch.randint(-3, 4, (37, 5), generator=generator).float()
        mat2 = torch.randint(-3, 4, (5, 80), generator=generator).float()
        for group in (0, 16):
            actual = weight.update(triton.addmm_, DEVICE, mat1, mat2, group, 0.0, 1.0)
            expected = weight.update(_update_reference.addmm_, "cpu", mat1, mat2, group, 0.0, 1.0)
            assert all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in pairs(actual, expected))
        weight.qdata.zero_()
        actual = weight.update(triton.add_, DEVICE, update, 16, 2.0)
        expected = weight.update(_update_reference.add_, "cpu", update, 16, 2.0)
        assert all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in pairs(actual, expected))


def check_special_values() -> None:
    weight = Weight(4, 64)
    zero = torch.zeros(4, 1), torch.zeros(1, 64)
    _, scale, level = weight.update(triton.addmm_, DEVICE, *zero, 0, 0.0, 1.0)
    assert level.item() == 2.0**-120
    assert unswizzle_scale(scale.cpu(), 4, 4).view(torch.uint8).unique().tolist() == [0x08]
    # A NaN marks its block, or with a global scale everything; other blocks are unharmed.
    single = Weight(4, 64, two_level=False, swizzled=False)
    update = torch.zeros(4, 64)
    update[1, 20], update[2, 40], update[3, 5] = torch.nan, torch.inf, 1e30
    actual = single.update(triton.add_, DEVICE, update, 0, 1.0)
    expected = single.update(_update_reference.add_, "cpu", update, 0, 1.0)
    scale = actual[1].cpu().view(torch.uint8)
    assert torch.equal(scale, expected[1].view(torch.uint8))
    assert [scale[1, 1], scale[2, 2], scale[3, 0]] == [0x7F, 0x7E, 0x7E]
    finite = torch.isfinite(single.values(expected))
    assert torch.equal(single.values(actual)[finite], single.values(expected)[finite])
    _, scale, level = weight.update(triton.add_, DEVICE, update, 0, 1.0)
    assert level.isnan()
    # beta == 0 reads nothing old, alpha == 0 reads no factor.
    weight.level.fill_(torch.nan)
    ones = torch.ones(4, 1), torch.ones(1, 64)
    storage = weight.update(triton.addmm_, DEVICE, *ones, 0, 0.0, 1.0)
    assert torch.equal(weight.values(storage), torch.ones(4, 64))
    weight = Weight(4, 64)
    storage = weight.update(triton.addmm_, DEVICE, ones[0] * torch.nan, ones[1], 0, 1.0, 0.0)
    assert torch.isfinite(weight.values(storage)).all()


def check_padding_is_left_alone() -> None:
    weight = Weight(5, 80, swizzled=True)
    weight.scale.view(torch.uint8)[unused_bytes(5, 5)] = 0xEE
    _, scale, _ = weight.update(triton.add_, DEVICE, torch.ones(5, 80), 0, 1.0)
    assert (scale.cpu().view(torch.uint8)[unused_bytes(5, 5)] == 0xEE).all()


def unused_bytes(rows, blocks):
    return swizzle_scale(torch.ones(rows, blocks, dtype=torch.uint8)) == 0


def check_seeds() -> None:
    weight = Weight(16, 128)
    update = normal(16, 128, seed=5) * 0.1
    factors = normal(16, 3, seed=6) * 0.1, normal(3, 128, seed=7)
    for function, operands in (
        (triton.add_, (update, 64, 1.0)),
        (triton.addmm_, (*factors, 64, 1.0, 1.0)),
    ):
        state = torch.get_rng_state()
        results = [weight.update(function, DEVICE, *operands, seed=s) for s in (7, 7, 8, -1, -2)]
        nearest = weight.update(function, DEVICE, *operands)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(results[0][0], results[1][0])
        for first, second in ((0, 2), (3, 4)):
            assert not torch.equal(results[first][0], results[second][0])
        for qdata, scale, level in results:
            assert not torch.equal(qdata, nearest[0])
            assert torch.equal(bytes_of(scale), bytes_of(nearest[1]))
            assert torch.equal(level, nearest[2])


def check_stochastic_mean(rows=64, features=256) -> None:
    for high_first in (False, True):
        weight = Weight(rows, features, high_first=high_first)
        weight.qdata.zero_()
        rotated = torch.full((rows, features), -2.25)
        rotated[:, ::16] = 6
        storage = weight.update(triton.add_, DEVICE, rotate_groups(rotated, 256), 256, 1.0, seed=3)
        values = weight.values(storage)
        torch.testing.assert_close(values[:, ::16], rotated[:, ::16], rtol=1e-5, atol=0)
        rest = values.unflatten(1, (-1, 16))[..., 1:]
        assert abs(rest.double().mean().item() + 2.25) < 0.02
        torch.testing.assert_close(rest.unique().min(), torch.tensor(-3.0), rtol=1e-5, atol=0)
        first = storage[0].cpu()
        assert first.unique(dim=0).shape[0] == rows
        swapped = swap_packed_pairs(first)
        assert not torch.equal(swapped, first)


DENSE = [
    (1, 16, 0), (3, 48, 16), (127, 80, 16), (9, 320, 64), (129, 256, 0), (2, 768, 256),
    (8, 272, 16), (130, 64, 64),
]  # fmt: skip
PRODUCTS = [
    (1, 16, 0, 1), (7, 64, 16, 3), (65, 144, 16, 17), (64, 320, 64, 33), (130, 256, 256, 0),
    (3, 512, 256, 16), (63, 48, 16, 40), (129, 80, 0, 5),
]  # fmt: skip


def main() -> None:
    check_add(DENSE)
    check_addmm(PRODUCTS)
    check_exact_on_small_integers()
    check_special_values()
    check_padding_is_left_alone()
    check_seeds()
    check_stochastic_mean()


if __name__ == "__main__":
    main()
    print("kernel checks passed")
