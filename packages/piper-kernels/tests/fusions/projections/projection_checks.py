"""Numeric checks of the projection kernels against the portable reference on the CPU.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import sys
from unittest.mock import patch

import torch
from projection_operands import assert_codes, assert_floats, operands

from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode
from piper_kernels.fusions.convrot_int8_sage_qk import _launch, projections, windows
from piper_kernels.fusions.projected_qk import _launch as projected_qk_launch
from piper_kernels.fusions.projected_qk import reference as projected_qk

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
MINMAX, MEAN = RoutingMode.MINMAX, RoutingMode.MEAN
WARP, THREAD = Granularity.PER_WARP, Granularity.PER_THREAD
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def reference(function, *arguments, **options):
    with patch.object(projections, "supports_device", return_value=False):
        return function(*arguments, **options)


def nan_filled():
    """Fill memory that nobody writes, so that a missing store is seen."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def check_rows(case, mode, granularity=WARP):
    """Compare queries and keys."""
    there = case.to(DEVICE)
    shared = (mode, case.lengths, granularity)
    expected = reference(
        projections.project_query, case.inputs, case.projection, case.transform, 0.1, *shared
    )
    on_device = (mode, there.lengths, granularity)
    actual = _launch.project_query(there.inputs, there.projection, there.transform, 0.1, *on_device)
    assert_codes(actual[0], expected[0], "query")
    assert_floats(actual[1], expected[1], "query scale")
    assert_floats(actual[2], expected[2], "query summary", atol=1e-5)
    expected = reference(
        projections.project_key, case.inputs, case.projection, case.transform, *shared
    )
    actual = _launch.project_key(there.inputs, there.projection, there.transform, *on_device)
    # A key that is half way between two numbers of 16 bits may be either.
    assert_codes(actual[0], expected[0], "key", 1e-2)
    assert_floats(actual[1], expected[1], "key scale", rtol=4e-3)
    assert_floats(actual[2], expected[2], "key summary", atol=1e-5)
    assert_floats(actual[3], expected[3], "auxiliary key summary", atol=1e-5)


def check_values(case, *, centered=True, per_tile=True, block_means=True):
    there = case.to(DEVICE)
    mean = case.input_mean if centered else None
    expected = reference(
        projections.project_value, case.inputs, case.projection, mean, per_tile=per_tile,
        with_block_means=block_means, block_lengths=case.lengths,
    )  # fmt: skip
    mean = there.input_mean if centered else None
    actual = _launch.project_value(
        there.inputs, there.projection, mean, per_tile, block_means, there.lengths
    )
    assert_codes(actual[0], expected[0], "value")
    for name, ours, theirs in zip(
        ("value multiplier", "value mean", "means of blocks"), actual[1:], expected[1:], strict=True
    ):
        if theirs is None:
            assert ours is None
        else:
            assert_floats(ours, theirs, name, atol=1e-4 if name == "value multiplier" else 1e-5)


def check_sparse():
    check_rows(operands(65, rotary=96), MINMAX)
    check_rows(
        operands(192, heads=1, rotary=128, affine=BRAIN, bias=BRAIN, lengths=[64, 17, 51]), MEAN
    )
    check_rows(operands(128, head_dim=64, heads=1, rotary=64, affine=None, bias=None), MINMAX)
    check_rows(operands(256, heads=3, features=320, rotary=128, bias=HALF, batch=2), MINMAX)
    check_rows(operands(70, heads=1, head_dim=64, rotary=2, bias=HALF, batch=2), MINMAX)
    check_rows(operands(128, heads=1, rotary=38, affine=HALF, bias=None, lengths=[1, 64]), MINMAX)
    check_values(operands(129))
    check_values(operands(192, heads=1, bias=BRAIN, lengths=[64, 17, 51]))
    check_values(operands(70, head_dim=64, heads=2, bias=None, batch=2), block_means=False)


def check_dense():
    check_rows(operands(1, rotary=128, heads=1), None)
    check_rows(operands(65, head_dim=64, rotary=32), None, THREAD)
    dense = {"per_tile": False, "block_means": False}
    check_values(operands(65), **dense)
    check_values(operands(63, head_dim=64, bias=None), centered=False, **dense)


def every_result(case, window_bytes):
    results = []
    with (
        patch.object(windows, "_CACHED_BYTES", window_bytes),
        patch.object(windows, "_HOPPER_BYTES", window_bytes),
    ):
        shared = (case.inputs, case.projection)
        results += _launch.project_query(*shared, case.transform, 1.0, MINMAX, None, WARP)
        results += _launch.project_key(*shared, case.transform, MEAN, None, WARP)
        results += _launch.project_value(*shared, case.input_mean, True, True, None)
    return results


def check_windows():
    """Windows of one tile, and of more than one batch, give the results of one window."""
    for case, limit in (
        (operands(130, heads=1, head_dim=64, rotary=64, batch=2), 64 * 64 * 4),
        (operands(66, heads=1, head_dim=64, rotary=64, batch=3), 2 * 66 * 64 * 4),
    ):
        there = case.to(DEVICE)
        whole, parts = every_result(there, 1 << 40), every_result(there, limit)
        for first, second in zip(whole, parts, strict=True):
            assert torch.equal(first, second)


def check_strided_bias():
    case = operands(65, heads=1, head_dim=64, rotary=64)
    bias = torch.full((64, 3), torch.nan)
    bias[:, 1] = case.projection.bias
    strided = type(case.projection)(case.projection.qdata, case.projection.scale, bias[:, 1], 64)
    check_values(type(case)(case.inputs, strided, case.transform, None, case.input_mean))


def check_special_rows():
    """Zero rows, rows of huge scale and values that do not vary."""
    case = operands(130, heads=1, bias=None)
    case.inputs.scale[:, 3] = 0
    case.inputs.scale[:, 70:75] = 1e6
    check_rows(case, MINMAX)
    case = operands(130, heads=1)
    case.inputs.qdata.zero_()
    case.input_mean.zero_()
    check_rows(case, MEAN)
    check_values(case)
    out = _launch.project_value(
        *[getattr(case.to(DEVICE), name) for name in ("inputs", "projection", "input_mean")],
        True, False, None,
    )  # fmt: skip
    assert not out[0].any()


if __name__ == "__main__":
    nan_filled()
    if DEVICE == "cpu":  # the interpreter rounds to bfloat16 towards zero
        projected_qk.KEY_DTYPE = projected_qk_launch.KEY_DTYPE = torch.float16
    check_sparse()
    check_dense()
    check_windows()
    check_strided_bias()
    check_special_rows()
    if DEVICE == "cuda":  # windows where the product encodes its tiles otherwise
        with patch.object(_launch, "_encode_in_product", return_value=False):
            check_rows(operands(65, rotary=96), MINMAX)
            check_rows(operands(192, heads=1, rotary=128, lengths=[64, 17, 51]), MEAN)
            check_values(operands(192, heads=1, bias=BRAIN, lengths=[64, 17, 51]))
    print("projection checks passed")
