import math

import pytest
import torch

from phyai_quant import Granularity, TensorQuant
from phyai_quant.specs import _activations
from phyai_quant.specs.quantized_input import dequantize_activation

E4M3 = torch.float8_e4m3fn
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def micro(dtype, group, *, dynamic=True):
    return TensorQuant(dtype, "block", dynamic=dynamic, micro_scaled=True, block_shape=(1, group))


NVFP4 = micro("nvfp4", 16)
MX = {"fp8_e4m3": (8, 448.0), "fp8_e5m2": (15, 57344.0), "mxfp4": (2, 6.0)}


def activation(rows, columns, dtype=torch.bfloat16):
    x = torch.randn(rows, columns) * torch.logspace(-3, 3, rows)[:, None]
    if rows > 2:
        x[1] = 0
    return x.to(dtype)


def nearest_e2m1(value):
    magnitude = abs(value)
    # ties go to the even code
    code = min(range(8), key=lambda code: (abs(E2M1[code] - magnitude), code % 2))
    return math.copysign(E2M1[code], value)


@pytest.mark.parametrize("dtype", MX)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (5, 96), (3, 65), (2, 1)])
def test_power_of_two_scales(dtype, rows, columns):
    exponent, largest = MX[dtype]
    x = activation(rows, columns)
    view = _activations.quantize(x, micro(dtype, 32))
    assert view.granularity is Granularity.BLOCK
    assert view.x_scale.shape == (rows, math.ceil(columns / 32))
    storage = {"fp8_e4m3": E4M3, "fp8_e5m2": torch.float8_e5m2, "mxfp4": E4M3}[dtype]
    assert view.x.dtype == storage
    for m in range(rows):
        for k in range(columns):
            group = x[m, k // 32 * 32 : k // 32 * 32 + 32].float()
            peak = group.abs().max().item()
            power = math.floor(math.log2(peak)) - exponent if peak else -126
            scale = view.x_scale[m, k // 32].item()
            assert scale == 2.0**power
            quotient = max(min(x[m, k].item() / scale, largest), -largest)
            if dtype == "mxfp4":
                assert view.x[m, k].item() == nearest_e2m1(quotient)
            else:
                assert view.x[m, k].item() == torch.tensor(quotient).to(storage).item()


@pytest.mark.parametrize("level", [None, 0.01])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (5, 48), (3, 32)])
def test_nvfp4(rows, columns, level):
    x = activation(rows, columns, torch.float32)
    static = None if level is None else torch.tensor([level])
    view = _activations.quantize(x, NVFP4, static)
    expected_level = level or x.abs().max().item() / (448 * 6)
    for m in range(rows):
        for k in range(columns):
            group = x[m, k // 16 * 16 : k // 16 * 16 + 16]
            wanted = torch.tensor(group.abs().max().item() / 6 / expected_level)
            block = wanted.clamp(2.0**-6, 448).to(E4M3).float().item()
            scale = view.x_scale[m, k // 16].item()
            assert scale == pytest.approx(block * expected_level, rel=1e-6)
            assert view.x[m, k].item() == nearest_e2m1(min(max(x[m, k].item() / scale, -6), 6))


@pytest.mark.parametrize("act", [NVFP4, *(micro(dtype, 32) for dtype in MX)], ids=str)
def test_reading_back_is_close_and_keeps_zero(act):
    x = activation(6, 64, torch.float32)
    view = _activations.quantize(x, act)
    fake = dequantize_activation(view, act.block_shape[1])
    row_errors = (fake - x).norm(dim=1) / x.norm(dim=1).clamp_min(1e-30)
    bound = {"nvfp4": 0.2, "mxfp4": 0.25, "fp8_e5m2": 0.12, "fp8_e4m3": 0.06}[act.dtype]
    # one level for the whole tensor leaves the smallest rows below its range
    rows = slice(3, None) if act.dtype == "nvfp4" else slice(None)
    assert (row_errors[rows] < bound).all()
    assert torch.equal(fake[1], torch.zeros(64))


def test_ties_go_to_even_codes():
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4])
    view = _activations.quantize(torch.cat([ties, -ties]), micro("mxfp4", 32))
    assert view.x_scale.tolist() == [[1.0], [1.0]]
    expected = torch.tensor([[0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0] * 4])
    assert torch.equal(view.x.float(), torch.cat([expected, -expected]))


def test_huge_rows_saturate_and_nan_shows():
    x = torch.full((2, 32), 3e38)
    x[1] = torch.randn(32)
    x[1, 5] = torch.nan
    for act in (NVFP4, *(micro(dtype, 32) for dtype in MX)):
        view = _activations.quantize(x[:1], act)
        fake = dequantize_activation(view, act.block_shape[1])
        assert fake.isfinite().all()
        assert (fake - 3e38).abs().max() < 0.26 * 3e38
        bad = dequantize_activation(_activations.quantize(x, act), act.block_shape[1])
        assert bad[1].isnan().any()


def test_views_and_empty_batches():
    x = torch.randn(64, 4).t()
    assert torch.equal(
        _activations.quantize(x, NVFP4).x.float(),
        _activations.quantize(x.contiguous(), NVFP4).x.float(),
    )
    assert _activations.quantize(torch.zeros(0, 64), NVFP4).x.shape == (0, 64)
    assert _activations.quantize(torch.zeros(2, 0, 64), micro("mxfp4", 32)).x.shape == (0, 64)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (TensorQuant("int8", "per_channel", dynamic=True), "allowed: symmetric fp8_e4m3, fp8_e5m2"),
        (TensorQuant("fp8_e4m3", "per_tensor", symmetric=False), "asymmetric; allowed: symmetric"),
        (TensorQuant("fp8_e4m3", "per_channel"), "a static scale is allowed per_tensor only"),
        (
            TensorQuant("fp8_e4m3", "block", dynamic=True, block_shape=(2, 8)),
            "allowed block_shape: (1, group along K)",
        ),
        (micro("fp8_e4m3", 16), "allowed: micro-scaled with block_shape (1, 32)"),
        (micro("nvfp4", 32), "allowed: micro-scaled with block_shape (1, 16)"),
        (micro("mxfp4", 32, dynamic=False), "allowed: dynamic scales"),
        (
            TensorQuant("nvfp4", "block", dynamic=True, block_shape=(1, 16)),
            "allowed: micro-scaled with block_shape (1, 16)",
        ),
    ],
)
def test_other_inputs_name_what_is_allowed(act, text):
    reason = _activations.unsupported(act)
    assert act.describe() in reason
    assert text in reason


def test_supported_inputs_have_no_reason():
    for act in (NVFP4, micro("nvfp4", 16, dynamic=False), *(micro(dtype, 32) for dtype in MX)):
        assert _activations.unsupported(act) == ""
