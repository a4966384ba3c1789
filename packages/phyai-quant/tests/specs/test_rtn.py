import math

import numpy as np
import pytest
import torch

from phyai_quant import Granularity, QDType, QuantConfigError, TensorQuant
from phyai_quant.specs import _packing, _rtn

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP8 = {QDType.FP8_E4M3: torch.float8_e4m3fn, QDType.FP8_E5M2: torch.float8_e5m2}


def stored(dtype: str, block: tuple[int, int] | None = None, granularity: str = "") -> TensorQuant:
    return TensorQuant(
        QDType(dtype),
        Granularity(granularity or ("block" if block else "per_channel")),
        micro_scaled=dtype in ("nvfp4", "mxfp4"),
        block_shape=block,
    )


def blocks_of(quant: TensorQuant, rows: int, columns: int) -> list[tuple[slice, slice]]:
    """Lists the slices that share a scale, row block after row block."""
    if quant.granularity is Granularity.PER_TENSOR:
        height, width = rows, columns
    else:
        height, width = quant.block_shape or (1, columns)
    return [
        (slice(top, min(top + height, rows)), slice(left, min(left + width, columns)))
        for top in range(0, rows, height)
        for left in range(0, columns, width)
    ]


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    values[0] = 0.0
    values[1] *= 1e4
    values[-1, ::2] = -values[-1, ::2].abs() * 3
    return values


INT_CASES = [
    stored("int4", (1, 16)),
    stored("int4"),
    stored("int8", (1, 32)),
    stored("int8", granularity="per_tensor"),
]
FLOAT_CASES = [
    stored("fp8_e4m3"),
    stored("fp8_e4m3", (8, 16)),
    stored("fp8_e5m2", granularity="per_tensor"),
    stored("fp8_e5m2", (1, 32)),
]


@pytest.mark.parametrize("quant", INT_CASES, ids=lambda quant: quant.describe())
@pytest.mark.parametrize("shape", [(5, 64), (17, 67), (2, 1)])
def test_integers_use_the_whole_range_of_each_block(
    quant: TensorQuant, shape: tuple[int, int]
) -> None:
    weight = weights(*shape)
    result = _rtn.quantize(weight, quant)
    top = 2 ** (_rtn.INT_BITS[quant.dtype] - 1)
    scales = result.scale.reshape(-1)
    for index, where in enumerate(blocks_of(quant, *shape)):
        block = weight[where].double().numpy()
        high, low = max(block.max(), 1e-30), max(-block.min(), 1e-30)
        step = max(max(high, low) / top, min(high, low) / (top - 1))
        step = -step if high > low else step
        assert scales[index].item() == pytest.approx(step, rel=1e-6)
        codes = result.codes[where].numpy()
        exact = block / scales[index].double().item()
        assert np.abs(codes - np.clip(exact, -top, top - 1)).max() <= 0.5 + 1e-4
        if np.abs(block).max() > 0 and max(high, low) / top >= min(high, low) / (top - 1):
            assert codes.min() == -top


def test_codes_round_half_to_even() -> None:
    weight = torch.tensor([[-8.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.0, 0.0]])
    assert _rtn.quantize(weight, stored("int4")).codes.tolist() == [[-8, 0, 2, 2, 0, -2, 3, 0]]


def test_positive_scales_lose_no_extreme() -> None:
    weight = weights(9, 64)
    result = _rtn.quantize(weight, stored("int8"), negative_scales=False)
    assert (result.scale > 0).all()
    restored = _rtn.dequantize(result, stored("int8"))
    assert ((restored - weight).abs() <= result.scale[:, None] * 0.5001).all()
    signed = _rtn.quantize(weight, stored("int8"))
    assert (signed.scale < 0).any()


@pytest.mark.parametrize("quant", FLOAT_CASES, ids=lambda quant: quant.describe())
@pytest.mark.parametrize("shape", [(9, 64), (17, 67)])
def test_fp8_takes_the_nearest_value_of_each_block(
    quant: TensorQuant, shape: tuple[int, int]
) -> None:
    weight = weights(*shape)
    result = _rtn.quantize(weight, quant)
    table = torch.arange(256, dtype=torch.uint8).view(FP8[quant.dtype]).float()
    table = table[table.isfinite()].unique()
    scales = result.scale.reshape(-1)
    for index, where in enumerate(blocks_of(quant, *shape)):
        block = weight[where]
        amax = max(block.abs().max().item(), 1e-30)
        assert scales[index].item() == pytest.approx(amax / table.max().item(), rel=1e-6)
        exact = block.double() / scales[index].double()
        nearest = (exact[..., None] - table.double()).abs().amin(-1)
        chosen = (exact - result.codes[where].double()).abs()
        assert (chosen <= nearest + exact.abs() * 1e-6).all()


@pytest.mark.parametrize("dtype", list(FP8), ids=str)
def test_fp8_rounds_every_tie_toward_zero(dtype: QDType) -> None:
    table = torch.arange(256, dtype=torch.uint8).view(FP8[dtype]).float()
    positive = table[table.isfinite() & (table >= 0)].unique()
    middles = (positive[:-1] + positive[1:]) / 2
    assert torch.equal(_rtn.encode_fp8(middles, dtype).float(), positive[:-1])
    assert torch.equal(_rtn.encode_fp8(-middles, dtype).float(), -positive[:-1])
    above = torch.nextafter(middles, torch.tensor(torch.inf))
    assert torch.equal(_rtn.encode_fp8(above, dtype).float(), positive[1:])
    assert torch.equal(_rtn.encode_fp8(positive, dtype).float(), positive)
    assert _rtn.encode_fp8(torch.tensor([1e30]), dtype).float().item() == positive.max()


def test_e2m1_codes_of_values_ties_and_signs() -> None:
    values = torch.tensor([*E2M1, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 100.0])
    expected = [*range(8), *range(7), 7]
    assert _rtn.encode_e2m1(values).tolist() == expected
    assert _rtn.encode_e2m1(-values).tolist() == [code | 8 for code in expected]
    for code, value in enumerate(_packing.E2M1_VALUES):
        assert value == (-1 if code > 7 else 1) * E2M1[code % 8]


def test_mxfp4_scales_are_powers_of_two_that_do_not_saturate() -> None:
    quant = stored("mxfp4", (1, 32))
    weight = weights(6, 64)
    weight[2] = 6.0  # amax / 6 is exactly 1, which must not be rounded up
    weight[3] = 1e-38
    result = _rtn.quantize(weight, quant)
    for index, where in enumerate(blocks_of(quant, *weight.shape)):
        amax = max(weight[where].abs().max().item(), 1e-30)
        expected = 2.0 ** math.ceil(math.log2(np.float32(amax) / np.float32(6)))
        assert result.scale.reshape(-1)[index].float().item() == expected
    restored = _rtn.dequantize(result, quant)
    steps = _rtn.expand_scale(result.scale.float(), quant, weight.shape)
    assert ((restored - weight).abs() <= steps).all()
    assert torch.equal(restored[2], weight[2])


def test_nvfp4_follows_its_two_scale_formula() -> None:
    quant = stored("nvfp4", (1, 16))
    weight = weights(7, 64)
    result = _rtn.quantize(weight, quant)
    global_scale = np.float32(weight.abs().max().item()) / np.float32(448 * 6)
    assert result.global_scale is not None
    assert result.global_scale.item() == pytest.approx(global_scale, rel=1e-6)
    for index, where in enumerate(blocks_of(quant, *weight.shape)):
        wanted = weight[where].abs().max() / 6.0 / result.global_scale
        block_scale = wanted.clamp(2.0**-6, 448.0).to(torch.float8_e4m3fn).float()
        assert result.scale.reshape(-1)[index].float() == block_scale
        exact = weight[where].double() / (block_scale * result.global_scale).double()
        codes = result.codes[where]
        for value, code in zip(exact.flatten().tolist(), codes.flatten().tolist(), strict=True):
            distance = [abs(abs(value) - entry) for entry in E2M1]
            assert distance[code % 8] <= min(distance) + 1e-5
    zero = _rtn.quantize(torch.zeros(2, 16), quant)
    assert not _rtn.dequantize(zero, quant).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_follow_the_fp32_scale_and_the_stored_scale_is_rounded(dtype: torch.dtype) -> None:
    weight = weights(5, 64).clamp(-100, 100).to(dtype)
    narrow = _rtn.quantize(weight, stored("int4", (1, 16)), scale_dtype=dtype)
    wide = _rtn.quantize(weight.float(), stored("int4", (1, 16)))
    assert torch.equal(narrow.codes, wide.codes)
    assert torch.equal(narrow.scale, wide.scale.to(dtype))


def test_strided_views_equal_contiguous_weights() -> None:
    wide = weights(34, 66)
    view = wide.t()[1:65:2, 1:33]
    for quant in (*INT_CASES, *FLOAT_CASES, stored("nvfp4", (1, 16)), stored("mxfp4", (1, 32))):
        strided, dense = _rtn.quantize(view, quant), _rtn.quantize(view.contiguous(), quant)
        assert torch.equal(strided.codes.view(torch.uint8), dense.codes.view(torch.uint8))
        assert torch.equal(strided.scale.float(), dense.scale.float())


@pytest.mark.parametrize("quant", [*INT_CASES, *FLOAT_CASES], ids=lambda quant: quant.describe())
def test_huge_rows_stay_finite(quant: TensorQuant) -> None:
    weight = torch.full((9, 64), 3e38)
    weight[1] = -3e38
    restored = _rtn.dequantize(_rtn.quantize(weight, quant), quant)
    torch.testing.assert_close(restored, weight, rtol=0.01, atol=0)


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (torch.ones(2, 2, dtype=torch.int8), r"torch\.int8 tensor of shape \[2, 2\].*float32"),
        (torch.ones(4), r"shape \[4\]"),
        (torch.ones(0, 4), r"shape \[0, 4\]"),
        (torch.full((1, 4), torch.nan), "NaN or infinite"),
        (torch.full((1, 4), torch.inf), "NaN or infinite"),
    ],
)
def test_sources_that_cannot_be_quantized(weight: torch.Tensor, text: str) -> None:
    with pytest.raises(QuantConfigError, match=text):
        _rtn.quantize(weight, stored("int8"))


def test_scales_beyond_their_dtype_are_an_error() -> None:
    with pytest.raises(QuantConfigError, match=r"too large for torch\.float16.*65504"):
        _rtn.quantize(torch.full((1, 8), 1e7), stored("int4"), scale_dtype=torch.float16)


@pytest.mark.parametrize(
    ("quant", "text"),
    [
        (TensorQuant(QDType.BF16, Granularity.PER_CHANNEL), "bf16 per_channel; allowed"),
        (TensorQuant(QDType.INT8, Granularity.PER_CHANNEL, symmetric=False), "asymmetric"),
        (TensorQuant(QDType.INT8, Granularity.PER_CHANNEL, dynamic=True), "dynamic"),
        (TensorQuant(QDType.MXFP4, Granularity.PER_CHANNEL), "micro_scaled exactly"),
        (TensorQuant(QDType.INT8, Granularity.PER_CHANNEL, rotation_group=16), "rotation_group"),
        (
            TensorQuant(QDType.INT4, Granularity.BLOCK, block_shape=(1, 8), act_order=True),
            "act_order",
        ),
    ],
)
def test_formats_that_cannot_be_produced(quant: TensorQuant, text: str) -> None:
    with pytest.raises(QuantConfigError, match=text):
        _rtn.quantize(torch.ones(2, 16), quant)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_the_lowest_k_in_the_lowest_bits(bits: int) -> None:
    per_word = 32 // bits
    codes = torch.randint(0, 2**bits, (3, 64), dtype=torch.uint8)
    words = _packing.pack_words(codes, bits)
    assert words.dtype is torch.int32
    for row in range(3):
        for word in range(64 // per_word):
            value = sum(int(codes[row, word * per_word + i]) << (bits * i) for i in range(per_word))
            assert words[row, word].item() % 2**32 == value
    assert torch.equal(_packing.unpack_words(words, bits), codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_offset_binary_covers_every_value(bits: int) -> None:
    values = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).to(torch.int8)
    codes = _packing.to_unsigned(values, bits)
    assert codes.tolist() == list(range(2**bits))
    assert torch.equal(_packing.to_signed(codes, bits), values)


@pytest.mark.parametrize(
    "quant",
    [*INT_CASES, *FLOAT_CASES, stored("nvfp4", (1, 16)), stored("mxfp4", (1, 32))],
    ids=lambda quant: quant.describe(),
)
def test_parts_with_the_extremes_of_the_whole_equal_the_whole(quant: TensorQuant) -> None:
    weight = weights(32, 64)
    extremes = (weight.min().item(), weight.max().item())
    whole = _rtn.dequantize(_rtn.quantize(weight, quant), quant)
    parts = [
        _rtn.dequantize(_rtn.quantize(part, quant, extremes=extremes), quant)
        for part in weight.split(8)
    ]
    assert torch.equal(torch.cat(parts), whole)
