from fractions import Fraction

import pytest
import torch

from piper_kernels.weights.nvfp4 import _encoding, _layout

LEVELS = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def nearest(value):
    """E2M1 code of a Python float by exact distances; ties go to the even code."""
    magnitude = abs(Fraction(value))
    distances = [abs(level - magnitude) for level in LEVELS]
    closest = [code for code, distance in enumerate(distances) if distance == min(distances)]
    code = min(closest, key=lambda c: (c % 2, c))
    negative = str(value).startswith("-")
    return code + 8 * negative


def boundary_values():
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    levels = torch.tensor([float(level) for level in LEVELS])
    exact = torch.cat((middles, levels, torch.tensor([6.5, 100.0, 1e30, 1e-30, 1e-45])))
    infinity = torch.tensor(torch.inf)
    around = torch.cat((exact, exact.nextafter(infinity), exact.nextafter(-infinity)))
    return torch.cat((around, -around))


def test_nearest_codes_at_every_boundary():
    values = boundary_values()
    assert _encoding.nearest_codes(values).tolist() == [nearest(v) for v in values.tolist()]


def test_nearest_codes_of_infinities():
    values = torch.tensor([torch.inf, -torch.inf])
    assert _encoding.nearest_codes(values).tolist() == [7, 15]


def test_nearest_codes_equal_torchao_on_every_bfloat16():
    from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked

    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    values = values[~values.isnan()]
    assert torch.equal(_encoding.nearest_codes(values), f32_to_f4_unpacked(values))


def test_decoding_every_byte():
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(16, 16)
    values = [float(level) for level in LEVELS]
    levels = values + [-v for v in values]
    low = [[levels[byte & 15], levels[byte >> 4]] for byte in range(256)]
    expected = torch.tensor(low).view(16, 32)
    for high_first in (False, True):
        stored = _layout.swap_packed_pairs(every) if high_first else every
        decoded = _encoding.decode_codes(stored, high_first=high_first)
        # Signed zeros count: code 8 is -0.
        assert torch.equal(decoded.view(torch.int32), expected.view(torch.int32))


def test_codes_survive_a_round_trip():
    codes = torch.randint(0, 16, (5, 48), dtype=torch.uint8)
    values = _encoding.decode_codes(_layout.pack_codes(codes))
    assert torch.equal(_encoding.nearest_codes(values), codes)


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0.0, 0x08),
        (1e-30, 0x08),
        (6 * 2.0**-6, 0x08),
        (6.0, 0x38),
        (6 * 448.0, 0x7E),
        (6 * 1e6, 0x7E),
        (3e38, 0x7E),
        (torch.inf, 0x7E),
    ],
)
def test_block_scales_saturate_instead_of_becoming_nan(amax, byte):
    values = torch.zeros(1, 16)
    values[0, 3] = -amax
    codes, scale = _encoding.encode(values)
    assert scale.view(torch.uint8).item() == byte
    assert codes[0, 3] == (15 if amax >= 6 * 2.0**-6 else 8)


@pytest.mark.parametrize("level", [0.0, 1e-45, 2.0**-120, 1e-10])
def test_tiny_global_scales_saturate(level):
    values = torch.zeros(2, 16)
    values[1] = torch.linspace(-3, 3, 16)
    codes, scale = _encoding.encode(values, torch.tensor(level))
    assert scale.view(torch.uint8).flatten().tolist() == [0x08, 0x7E]
    assert codes[0].unique().tolist() == [0]
    assert codes[1].unique().tolist() == [7, 15]


def test_per_tensor_scale():
    assert _encoding.per_tensor_scale_of(torch.tensor(2688.0)).item() == 1.0
    for amax in (0.0, 1e-36):
        assert _encoding.per_tensor_scale_of(torch.tensor(amax)).item() == 2.0**-120
    half = _encoding.per_tensor_scale_of(torch.tensor(1.0, dtype=torch.float16))
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(1 / 2688, rel=1e-7)


@pytest.mark.parametrize("level", [None, 0.01])
def test_encode_by_the_definition(level):
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(3, 48, generator=generator)
    scalar = None if level is None else torch.tensor(level)
    codes, scale = _encoding.encode(values, scalar)
    one = torch.tensor(1.0)
    for row in range(3):
        for block in range(3):
            chunk = values[row, 16 * block : 16 * block + 16]
            wanted = chunk.abs().max() / 6
            wanted = wanted if scalar is None else wanted / scalar
            stored = wanted.clamp(2.0**-6, 448).to(torch.float8_e4m3fn)
            assert stored.view(torch.uint8) == scale[row, block].view(torch.uint8)
            reciprocal = (one if scalar is None else one / scalar) / stored.float()
            expected = [nearest(v) for v in (chunk * reciprocal).tolist()]
            assert codes[row, 16 * block : 16 * block + 16].tolist() == expected


def test_stochastic_codes_are_adjacent_unbiased_and_keep_the_scale():
    values = torch.full((2048, 16), 1.25)
    values[:, 0] = 6.0  # fixes the block scale to 1
    values[:, 1] = -2.25
    nearest_codes, nearest_scale = _encoding.encode(values)
    codes, scale = _encoding.encode(values, rounding_seed=5)
    assert torch.equal(scale.view(torch.uint8), nearest_scale.view(torch.uint8))
    assert torch.equal(codes[:, 0], nearest_codes[:, 0])
    decoded = _encoding.decode_codes(_layout.pack_codes(codes))
    assert set(decoded[:, 1].unique().tolist()) == {-2.0, -3.0}
    assert set(decoded[:, 2:].unique().tolist()) == {1.0, 1.5}
    assert decoded[:, 2:].mean().item() == pytest.approx(1.25, abs=0.005)
    assert decoded[:, 1].mean().item() == pytest.approx(-2.25, abs=0.03)
    assert nearest_codes[:, 2:].unique().tolist() == [2]


def test_stochastic_codes_divide_by_both_scale_levels():
    values = torch.full((2048, 16), 1.25 * 0.01)
    values[:, 0] = 6.0 * 0.01
    level = torch.tensor(0.01)
    codes, scale = _encoding.encode(values, level, rounding_seed=5)
    assert scale.float().unique().tolist() == [1.0]
    decoded = _encoding.decode_codes(_layout.pack_codes(codes))
    assert set(decoded[:, 1:].unique().tolist()) == {1.0, 1.5}
    assert decoded[:, 1:].mean().item() == pytest.approx(1.25, abs=0.005)


def test_stochastic_codes_under_an_unusable_scale_are_the_nearest_ones():
    values = torch.ones(1, 32)
    values[0, 3] = torch.nan
    nearest_codes, scale = _encoding.encode(values)
    assert scale.float().isnan().tolist() == [[True, False]]
    codes, _ = _encoding.encode(values, rounding_seed=1)
    assert torch.equal(codes[:, :16], nearest_codes[:, :16])
