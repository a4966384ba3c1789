"""INT8 products against an int64 oracle, and results that must not leave their buffers."""

import pytest
import torch

from piper_kernels.linear.convrot.int8 import reference
from piper_kernels.linear.convrot.int8._backend import select_linear_backend
from piper_kernels.linear.nvfp4._backend import select_linear_backend as select_nvfp4_backend
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
ROWS = (0, 1, 7, 31, 33, 127, 129, 1000)
# Widths and outputs off the tiles; the last is aligned, as the fastest schedules need it.
SHAPES = ((16, 1), (48, 33), (1040, 127), (272, 129), (1024, 256))
GUARD = 77


def codes(*shape, generator=None):
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


def oracle(left, right, rows, columns, bias):
    """Return the result of the contract with the integer sums in int64, FP32."""
    total = (left.double() @ right.double().t()).round().long()  # exact: below 2**53
    assert total.abs().max() < 2**31 if total.numel() else True
    result = total.to(torch.float32) * rows[:, None] * columns[None, :]
    return result if bias is None else result + bias.float()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("depth", "outputs"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_sums_are_exact(rows, depth, outputs, device):
    generator = torch.Generator().manual_seed(rows + depth)
    left = codes(rows, depth, generator=generator)
    right = codes(outputs, depth, generator=generator)
    ones, columns = torch.ones(rows), torch.ones(outputs)
    expected = oracle(left, right, ones, columns, None)
    found = select_linear_backend(torch.device(device)).linear_prepared(
        left.to(device),
        ones.to(device),
        right.to(device),
        columns[:, None].to(device),
        None,
        torch.float32,
    )
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_the_largest_sums_are_exact(device):
    depth = 131_056  # the largest multiple of 16 whose sums fit into int32
    left = torch.full((33, depth), -128, dtype=torch.int8, device=device)
    right = torch.full((40, depth), -128, dtype=torch.int8, device=device)
    left[1], right[1] = 127, 127
    ones = torch.ones(40, 1, device=device)
    found = select_linear_backend(left.device).linear_prepared(
        left, ones[:33, 0].contiguous(), right, ones, None, torch.float32
    )
    expected = oracle(left.cpu(), right.cpu(), torch.ones(33), torch.ones(40), None)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 33, 129])
def test_strided_operands_and_caller_owned_outputs(rows, bias_dtype, device):
    generator = torch.Generator().manual_seed(rows)
    depth, outputs = 272, 129
    x = torch.randn(depth, rows, generator=generator).t()
    right = codes(outputs, depth, generator=generator)
    scale = torch.rand(outputs, 1, generator=generator) + 0.5
    bias = torch.randn(2 * outputs, generator=generator).to(bias_dtype)[::2]
    backend = select_linear_backend(torch.device(device))
    qdata, row_scale = backend.prepare_input(x.to(device), 16)
    expected = oracle(qdata.cpu(), right, row_scale.cpu(), scale[:, 0], bias)
    buffer = torch.full((rows, outputs + GUARD), torch.nan, device=device)
    out = buffer[:, :outputs]
    moved = bias.to(device)
    moved = torch.empty_strided(bias.shape, (2,), dtype=bias_dtype, device=device).copy_(moved)
    found = backend.linear_prepared(
        qdata, row_scale, right.to(device), scale.to(device), moved, torch.float32, out=out
    )
    assert found.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-4)
    assert torch.isnan(buffer[:, outputs:]).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [7, 129])
def test_paired_projections_append_their_columns(rows, device):
    generator = torch.Generator().manual_seed(3)
    depth, outputs = 256, 72
    backend = select_linear_backend(torch.device(device))
    left = codes(rows, depth, generator=generator).to(device)
    row_scale = torch.rand(rows, generator=generator).to(device)
    weights = [
        (
            codes(outputs, depth, generator=generator).to(device),
            (torch.rand(outputs, 1, generator=generator) + 0.5).to(device),
            bias.to(device) if bias is not None else None,
        )
        for bias in (None, torch.randn(outputs, generator=generator))
    ]
    out = torch.full((rows, 2 * outputs), torch.nan, device=device)
    backend.linear_prepared(
        left, row_scale, *weights[0], torch.float32, out=out, second_projection=weights[1]
    )
    for index, (qdata, scale, bias) in enumerate(weights):
        expected = reference.linear_prepared(
            left.cpu(),
            row_scale.cpu(),
            qdata.cpu(),
            scale.cpu(),
            torch.float32,
            None if bias is None else bias.cpu(),
        )
        part = out[:, index * outputs : (index + 1) * outputs].cpu()
        torch.testing.assert_close(part, expected, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor", [0.0, 3e4, 1e30])
def test_zero_and_huge_rows(factor, device):
    torch.manual_seed(0)
    x = torch.randn(33, 64)
    x[5] *= factor
    weight = ConvRotInt8Tensor.from_hp(torch.randn(40, 64), group_size=16)
    bias = torch.randn(40)
    backend = select_linear_backend(torch.device(device))
    storage = [part.to(device) for part in (weight.qdata, weight.scale, bias)]
    found = backend.linear(x.to(device), *storage, 16).cpu()
    expected = reference.linear(x, weight.qdata, weight.scale, 16, bias)
    assert torch.isfinite(found).all()
    # Scaled before the norm, which squares.
    largest = expected.abs().amax(dim=1, keepdim=True)
    error = ((found - expected) / largest).norm(dim=1) / (expected / largest).norm(dim=1)
    assert error.max() < 1e-2
    if factor == 0:
        assert torch.equal(found[5], bias)


def guarded(rows, columns, dtype, fill):
    """Return a buffer filled with ``fill`` and the view in its middle."""
    size = rows * columns
    buffer = torch.full((size + 2 * GUARD * 1024,), fill, dtype=dtype, device="cuda")
    start = GUARD * 1024
    return buffer, buffer[start : start + size].view(rows, columns)


def assert_guards(buffer, fill):
    edge = GUARD * 1024
    for part in (buffer[:edge], buffer[-edge:]):
        assert torch.equal(part, torch.full_like(part, fill))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("paired", [False, True])
def test_results_beyond_32_bits_stay_inside_their_buffer(paired):
    rows, columns, depth = 80_000, 28_672, 64
    generator = torch.Generator().manual_seed(1)
    left = codes(rows, depth, generator=generator).cuda()
    right = codes(columns, depth, generator=generator).cuda()
    row_scale = torch.rand(rows, generator=generator).cuda()
    scale = torch.rand(columns, 1, generator=generator).cuda()
    buffer, out = guarded(rows, columns, torch.bfloat16, -12345.0)
    backend = select_linear_backend(torch.device("cuda"))
    half = columns // 2 if paired else columns
    second = (right[half:], scale[half:], None) if paired else None
    backend.linear_prepared(
        left,
        row_scale,
        right[:half],
        scale[:half],
        None,
        torch.bfloat16,
        out=out,
        second_projection=second,
    )
    assert_guards(buffer, -12345.0)
    for first in range(0, rows, 8000):
        part = slice(first, first + 8000)
        total = torch.ops.aten._int_mm.default(left[part], right.t())
        expected = (total.float() * row_scale[part, None] * scale[:, 0]).bfloat16()
        assert torch.equal(out[part], expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_prepared_inputs_beyond_32_bits_stay_inside_their_buffer():
    rows, features = 80_000, 28_672
    x = torch.randn(rows, 64, dtype=torch.bfloat16, device="cuda").repeat(1, features // 64)
    buffer, qdata = guarded(rows, features, torch.int8, 99)
    scales, row_scale = guarded(rows, 1, torch.float32, -1.0)
    backend = select_linear_backend(torch.device("cuda"))
    backend.prepare_input(x, 64, out=(qdata, row_scale.view(rows)))
    assert_guards(buffer, 99)
    assert_guards(scales, -1.0)
    for first in (0, 37_449, 74_898, rows - 64):
        part = slice(first, first + 64)
        codes_part, scale_part = backend.prepare_input(x[part], 64)
        assert torch.equal(qdata[part], codes_part)
        assert torch.equal(row_scale[part, 0], scale_part)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nvfp4_results_beyond_32_bits():
    rows, columns, depth = 80_000, 28_672, 64
    torch.manual_seed(0)
    dense = torch.randn(columns, depth, dtype=torch.bfloat16, device="cuda")
    weight = PiperNVFP4Tensor.from_hp(dense, compute_per_tensor_scale=True, is_swizzled_scales=True)
    x = torch.randn(rows, depth, dtype=torch.bfloat16, device="cuda")
    level = weight.per_tensor_scale
    found = select_nvfp4_backend(x.device).weight_only_linear(
        x,
        weight.qdata,
        weight.scale,
        None if level is None else level.view(()),
        None,
        0,
        True,
        False,
    )
    exact = weight.dequantize(torch.float32)
    for first in (0, 37_449, 74_898, rows - 64):
        expected = x[first : first + 64].float() @ exact.t()
        error = (found[first : first + 64].float() - expected).norm() / expected.norm()
        assert error < 4e-3
