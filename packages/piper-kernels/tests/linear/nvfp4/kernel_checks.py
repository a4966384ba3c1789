"""Numeric checks of the NVFP4 linear kernels against FP64 and the portable reference.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` and names of checks on a GPU.
"""

import sys
import time
from itertools import product
from unittest.mock import patch

import torch
from kernel_operands import (
    DEVICE,
    FLOATS,
    as_bytes,
    assert_close,
    bias_of,
    compare_codes,
    make_weight,
    move,
    normal,
    poisoned_allocations,
)

from piper_kernels._input_activations import width_factor
from piper_kernels.linear.nvfp4 import _product, _weight, reference, triton
from piper_kernels.linear.nvfp4._operand_kernels import rotated_operand_kernel
from piper_kernels.linear.nvfp4._plan import ProductPlan
from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

BACKEND = triton.TritonBackend()
# Rows, outputs, features, rotation group: off the tiles in every direction.
SHAPES = [
    (1, 5, 16, 0), (7, 33, 48, 16), (31, 64, 272, 0), (33, 129, 64, 64), (127, 70, 80, 16),
    (129, 130, 320, 64), (3, 65, 768, 256), (16, 7, 2064, 0), (70, 3, 256, 256),
]  # fmt: skip
PLANS = [
    ProductPlan(16, 64, 64, 1, 1, 4, 2, 0), ProductPlan(32, 64, 128, 2, 1, 4, 3, 0),
    ProductPlan(16, 64, 256, 3, 1, 4, 3, 0), ProductPlan(64, 64, 64, 1, 2, 4, 2, 64),
    ProductPlan(16, 32, 128, 2, 8, 4, 2, 64),
]  # fmt: skip


def check_weight_only():
    layouts = list(product((True, False), (True, False), (False, True)))
    for turn in (0, 3):
        # Every layout meets rotated and plain weights; both turns meet every shape.
        for index, shape in enumerate(SHAPES):
            rows, outputs, features, group = shape
            swizzled, two_level, high_first = layouts[(index + turn) % len(layouts)]
            dtype = FLOATS[(index + turn // 3) % 3]
            weight, exact = make_weight(
                outputs, features, swizzled=swizzled, two_level=two_level, high_first=high_first
            )
            x = normal(rows, 2, features, seed=3, dtype=dtype).to(DEVICE)[:, 0]
            bias = bias_of(outputs, (None, *FLOATS)[(index + rows) % 4])
            operands = move(weight.qdata, weight.scale, weight.per_tensor_scale)
            with poisoned_allocations():
                actual = BACKEND.weight_only_linear(x, *operands, bias, group, swizzled, high_first)
            assert (actual.shape, actual.dtype) == ((rows, outputs), dtype)
            dense = x.cpu().double()
            expected = (rotate_groups(dense, group) if group else dense) @ exact.t()
            expected = expected if bias is None else expected + bias.cpu().double()
            assert_close(actual, expected, dtype)


def check_rotated_operands():
    for rows, features, dtype in ((3, 2304, torch.float32), (1, 256, torch.float16)):
        x = normal(rows, features + 16, seed=3, dtype=dtype).to(DEVICE)[:, :features]
        with poisoned_allocations():
            out = torch.empty(rows, features, device=DEVICE)
        grid = (rows * -(-features // 2048),)
        sizes = (rows, features, x.stride(0), 1, 2048)
        rotated_operand_kernel[grid](x, out, *sizes, LEADS=DEVICE == "cuda", num_warps=1)
        expected = rotate_groups(x.cpu().double(), 256).view(rows, -1, 4, 8, 2, 4)
        expected = expected.permute(0, 1, 5, 3, 2, 4).reshape(rows, features)
        assert_close(out, expected)


def check_every_plan():
    # The interpreter multiplies in FP32 only. On a GPU every case is a compilation.
    dtypes = FLOATS if DEVICE == "cuda" else (torch.float32,)
    shapes = (SHAPES[1], SHAPES[5], SHAPES[6])
    for index, (plan, shape) in enumerate(product(PLANS, shapes)):
        rows, outputs, features, _ = shape
        dtype = dtypes[index % len(dtypes)]
        weight, exact = make_weight(outputs, features)
        x = normal(rows, features, seed=3, dtype=dtype).to(DEVICE)
        operand = x
        if plan.arrangement:
            width = _weight.operand_width(features, plan)
            operand = torch.zeros(rows, width, dtype=dtype, device=DEVICE)
            operand[:, :features] = x
            operand = operand.view(rows, -1, 16, 4).transpose(2, 3).reshape(rows, width)
        bias = bias_of(outputs, torch.bfloat16)
        # The result is a part of wider rows that must stay as they are.
        out = torch.full((rows, outputs + 9), 7.0, device=DEVICE)
        side = _product.Weight(
            *move(weight.qdata, weight.scale, weight.per_tensor_scale), bias, True, False
        )
        with poisoned_allocations():
            _product.multiply(operand, torch.tensor(0.5).to(DEVICE), side, out[:, 4:-5], plan, 4.0)
        assert (out[:, :4] == 7).all()
        assert (out[:, -5:] == 7).all()
        expected = 2 * x.cpu().double() @ exact.t() + bias.cpu().double()
        assert_close(out[:, 4:-5], expected)


def check_decoded_weights():
    plan = ProductPlan(0, 0, 0, 1, 1, 0, 0, arrangement=0, decoded=True)
    dtypes = FLOATS[:2] if DEVICE == "cuda" else (torch.float32,)
    layouts = product((False, True), (False, True), (False, True))
    for (swizzled, two_level, high_first), dtype in product(layouts, dtypes):
        rows, outputs, features = 37, 300, 272
        weight, exact = make_weight(
            outputs, features, swizzled=swizzled, two_level=two_level, high_first=high_first
        )
        x = normal(rows, features + 8, seed=4, dtype=dtype).to(DEVICE)[:, 3:-5]
        level = weight.per_tensor_scale
        side = _product.Weight(
            *move(weight.qdata, weight.scale),
            None if level is None else level.to(DEVICE),
            bias_of(outputs, torch.float32),
            swizzled,
            high_first,
        )
        out = torch.full((rows, outputs + 9), 7.0, device=DEVICE)
        with poisoned_allocations(), patch.object(_product, "DECODED_BYTES", 0):
            _product.multiply(x, None, side, out[:, 4:-5], plan, 4.0)
        assert (out[:, :4] == 7).all()
        assert (out[:, -5:] == 7).all()
        expected = 4 * x.cpu().double() @ exact.t() + side.bias.cpu().double()
        assert_close(out[:, 4:-5], expected)


def check_prepared_inputs():
    flags = list(product((True, False), (True, False)))
    for turn in range(2):
        for index, (rows, _, features, group) in enumerate(SHAPES[: 9 - 6 * turn]):
            high_first, dynamic = flags[(index + turn) % len(flags)]
            activation = (None, "gelu_tanh", "swiglu")[(index + turn) % 3]
            width = features * width_factor(activation)
            x = normal(rows, 2, width, seed=5, dtype=FLOATS[rows % 3])[:, 1]
            given = None if dynamic else torch.tensor(0.003)
            arguments = (dynamic, activation, high_first)
            with poisoned_allocations():
                actual = BACKEND.prepare_input(*move(x, given), *arguments, group_size=group)
            expected = reference.prepare_input(x, given, *arguments, group_size=group)
            for got, wanted in zip(actual, expected, strict=True):
                assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
                assert got.is_contiguous()
            assert given is None or actual[2].data_ptr() != given.data_ptr()
            compare_codes(actual, expected, rows, features, exact=group == 0 and not activation)
            buffers = [torch.full_like(part.view(torch.uint8), 0x55) for part in actual[:2]]
            out = buffers[0], buffers[1].view(torch.float8_e4m3fn), torch.empty_like(actual[2])
            again = BACKEND.prepare_input(*move(x, given), *arguments, group_size=group, out=out)
            assert again is out
            for got, wanted in zip(out, actual, strict=True):
                assert torch.equal(as_bytes(got), as_bytes(wanted))


def check_linear_prepared():
    for (rows, outputs, features, _), dtype in zip(SHAPES, FLOATS * 3, strict=True):
        weight, exact = make_weight(outputs, features)
        x = normal(rows, features, seed=6)
        prepared = reference.prepare_input(x, None, True)
        values = PiperNVFP4Tensor(*prepared[:2], 16, torch.float32, prepared[2], None, True)
        bias = bias_of(outputs, FLOATS[rows % 3])
        operands = move(*prepared, weight.qdata, weight.scale, weight.per_tensor_scale)
        expected = values.dequantize().double() @ exact.t() + bias.cpu().double()
        with poisoned_allocations():
            actual = BACKEND.linear_prepared(*operands, bias, dtype)
        assert actual.dtype == dtype
        assert_close(actual, expected, dtype)
        wide = torch.full((rows, 2 * outputs), 7.0, dtype=dtype, device=DEVICE)
        out = wide[:, :outputs]
        assert BACKEND.linear_prepared(*operands, bias, dtype, out=out) is out
        assert torch.equal(out, actual)
        assert (wide[:, outputs:] == 7).all()


def check_linear():
    flags = list(product((True, False), (True, False)))
    for index, (rows, outputs, features, group) in enumerate(SHAPES):
        dynamic, high_first = flags[index % len(flags)]
        dtype = FLOATS[rows % 3]
        weight, exact = make_weight(outputs, features, high_first=high_first)
        # Integers: their rotations are exact, so both sides store the same codes.
        x = normal(rows, features, seed=7).mul(9).round().to(dtype)
        given = None if dynamic else torch.tensor(0.003)
        bias = bias_of(outputs, FLOATS[rows % 3])
        prepared = reference.prepare_input(x, given, dynamic, group_size=group)
        values = PiperNVFP4Tensor(*prepared[:2], 16, torch.float32, prepared[2], None, True)
        expected = values.dequantize().double() @ exact.t() + bias.cpu().double()
        operands = move(x, weight.qdata, weight.scale, weight.per_tensor_scale, given)
        with poisoned_allocations():
            actual = BACKEND.linear(*operands, bias, dynamic, high_first, group_size=group)
        assert (actual.shape, actual.dtype) == ((rows, outputs), dtype)
        assert_close(actual, expected, dtype)


def check_corner_values():
    weight, exact = make_weight(33, 256)
    operands = move(weight.qdata, weight.scale, weight.per_tensor_scale)
    bias = normal(33, seed=4).to(DEVICE)
    for group in (0, 256):
        x = normal(4, 256, seed=8)
        x[0], x[1] = 0, x[1] * 1e30
        result = BACKEND.weight_only_linear(x.to(DEVICE), *operands, bias, group, True, False)
        assert torch.equal(result[0], bias)
        assert result.isfinite().all()
        # The interpreter truncates to bf16.
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
        zero = torch.zeros(3, 256, dtype=dtype, device=DEVICE)
        for dynamic in (True, False):
            result = BACKEND.linear(zero, *operands, None, bias, dynamic, group_size=group)
            assert torch.equal(result, bias.to(dtype).expand(3, 33))
            qdata, _, level = BACKEND.prepare_input(zero, None, dynamic, group_size=group)
            assert level.item() == (0 if dynamic else 1)
            assert not qdata.any()
    # A float16 row of 60000 that is one value of 960000 when rotated.
    x = rotate_groups(torch.eye(256)[:2] * 960_000, 256).half()
    small = (*operands[:2], operands[2] * 0.01)
    result = BACKEND.weight_only_linear(x.to(DEVICE), *small, None, 256, True, False)
    assert_close(result, rotate_groups(x.double(), 256) @ exact.t() * 0.01, torch.float16)
    for bad in (torch.nan, torch.inf):
        x = normal(3, 256, seed=9)
        x[1, 5] = bad
        result = BACKEND.weight_only_linear(x.to(DEVICE), *operands, bias, 0, True, False).cpu()
        assert result[[0, 2]].isfinite().all()
        assert not result[1].isfinite().any()
    weight.scale.view(torch.uint8).view(-1)[0] = 0x7F  # the NaN of E4M3
    operands = move(weight.qdata, weight.scale, weight.per_tensor_scale)
    result = BACKEND.weight_only_linear(
        normal(3, 256).to(DEVICE), *operands, None, 0, True, False
    ).cpu()
    assert result[:, 0].isnan().all()
    assert result[:, 1:].isfinite().all()


def check_empty_operands():
    weight, _ = make_weight(33, 64)
    operands = move(weight.qdata, weight.scale, weight.per_tensor_scale)
    x = torch.zeros(2, 0, 64, device=DEVICE)
    assert BACKEND.linear(x, *operands, None, None, True).shape == (2, 0, 33)
    assert BACKEND.weight_only_linear(x, *operands, None, 0, True, False).shape == (2, 0, 33)
    for given in (None, torch.tensor(0.5)):
        prepared = BACKEND.prepare_input(*move(x, given), False)
        assert [tuple(part.shape) for part in prepared] == [(0, 32), (0, 16), ()]
        assert prepared[2].item() == (1 if given is None else 0.5)
    assert BACKEND.prepare_input(x, None, True)[2].item() == 0
    assert BACKEND.linear_prepared(*prepared, *operands, None, torch.bfloat16).shape == (0, 33)
    nothing = weight.qdata[:0], weight.scale[:0], weight.per_tensor_scale
    assert BACKEND.linear(x.new_zeros(5, 64), *move(*nothing), None, None, True).shape == (5, 0)


def check_unaligned_storage():
    weight, exact = make_weight(33, 64)
    storage = torch.zeros(33 * 32 + 1, dtype=torch.uint8, device=DEVICE)
    shifted = storage[1:].view(33, 32)
    shifted.copy_(weight.qdata)
    x = normal(5, 64, seed=3)
    result = BACKEND.weight_only_linear(
        x.to(DEVICE), shifted, *move(weight.scale, weight.per_tensor_scale), None, 0, True, False
    )
    assert_close(result, x.double() @ exact.t())
    out = (
        storage[1 : 5 * 32 + 1].view(5, 32),
        torch.empty(32, 16, device=DEVICE).to(torch.float8_e4m3fn),
        torch.empty((), device=DEVICE),
    )
    qdata, _, _ = BACKEND.prepare_input(x.to(DEVICE), None, True, out=out)
    assert torch.equal(qdata.cpu(), reference.prepare_input(x, None, True)[0])


if __name__ == "__main__":
    for name, check in list(globals().items()):
        if name.startswith("check_") and name in (sys.argv[2:] or [name]):
            begin = time.perf_counter()
            check()
            print(name, f"{time.perf_counter() - begin:.1f} s")
    print("kernel checks passed")
