"""Numeric checks of the INT8 linear kernels against independent CPU maths.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import sys

import torch

from piper_kernels.linear.convrot.int8 import _launch, reference
from piper_kernels.linear.convrot.int8._plan import MatmulPlan
from piper_kernels.linear.convrot.int8._triton_backend import TritonBackend

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# The interpreter truncates to bfloat16.
OUTPUTS = FLOATS if DEVICE == "cuda" else (torch.float16, torch.float32)
SMALL_TILES = MatmulPlan(16, 32, 32, num_warps=4, num_stages=2, group_m=3)
SPLIT = MatmulPlan(32, 64, 64, num_warps=4, num_stages=2, group_m=0, split_k=3)

generator = torch.Generator().manual_seed(5)


def normal(*shape):
    return torch.randn(*shape, generator=generator)


def codes(*shape):
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def moved(value):
    """Move to the device with the strides of the value."""
    if value is None:
        return None
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
    return copy.copy_(value)


def prepare(x, group, activation=None, static=None):
    return TritonBackend().prepare_input(
        moved(x), group, activation, None if static is None else static.to(DEVICE)
    )


def assert_prepared(actual, expected, tolerance=2e-6):
    (qdata, scale), (expected_qdata, expected_scale) = actual, expected
    assert (qdata.shape, qdata.dtype) == (expected_qdata.shape, torch.int8)
    torch.testing.assert_close(scale.cpu(), expected_scale, rtol=tolerance, atol=0)
    difference = (qdata.cpu().int() - expected_qdata.int()).abs()
    assert difference.numel() == 0 or difference.max() <= 1, difference.max()
    assert difference.numel() == 0 or difference.double().mean() < 0.01


def check_preparation() -> None:
    cases = [
        ((7,), 512, 256, None, None),
        ((2, 3), 64, 16, "gelu_tanh", None),
        ((), 192, 64, "swiglu", None),
        ((3,), 5376, 256, "swiglu", 0.02),
        ((33,), 80, 16, None, 0.5),
        ((2,), 49_152, 256, None, None),
        ((2,), 49_152 + 256, 64, "gelu_tanh", None),
        ((1,), 65_536, 16, None, 0.01),
    ]
    for index, (lead, features, group, activation, static) in enumerate(cases):
        width = features * (2 if activation == "swiglu" else 1)
        x = normal(*lead, width).to(FLOATS[index % 3])
        scale = None if static is None else torch.tensor(static)
        expected = reference.prepare_input(x, group, activation, scale)
        assert_prepared(prepare(x, group, activation, scale), expected, 2e-5)


def check_special_rows() -> None:
    x = normal(6, 256)
    x[1] = 0
    x[2] *= 1e37
    x[3] *= 1e-36
    x[4, 7] = torch.nan
    x[5, 8] = -torch.inf
    qdata, scale = (part.cpu() for part in prepare(x, 256))
    expected_qdata, expected_scale = reference.prepare_input(x, 256)
    torch.testing.assert_close(scale[:4], expected_scale[:4], rtol=2e-6, atol=0)
    assert not scale[4:].isfinite().any()
    assert (qdata[:4].int() - expected_qdata[:4].int()).abs().max() <= 1
    assert scale[1].item() == torch.tensor(1e-30).item()
    assert qdata[[1, 4, 5]].abs().max() == 0


def check_activation_limits() -> None:
    x = torch.tensor([[-1e30, -90.0, -5.0, 0.0, 5.0, 90.0, 1e12, 3.0] * 2])
    for activation in ("gelu_tanh", "swiglu"):
        source = x if activation == "gelu_tanh" else torch.cat([x.clamp(-1e3, 1e3), x], -1)
        expected = reference.prepare_input(source, 16, activation)
        actual = prepare(source, 16, activation)
        assert_prepared(actual, expected)
        assert actual[1].isfinite().all()


def check_integers_are_exact() -> None:
    dense = torch.randint(-8, 9, (13, 512), generator=generator)
    for group in (16, 64, 256):
        for dtype in FLOATS:
            for static in (None, torch.tensor(0.25)):
                x = dense.to(dtype)
                expected = reference.prepare_input(x, group, None, static)
                actual = prepare(x, group, None, static)
                assert_prepared(actual, expected, 2e-7)
                # The interpreter rounds between the two operations of an FMA.
                if DEVICE == "cuda" or static is not None:
                    assert torch.equal(actual[0].cpu(), expected[0])
                    assert torch.equal(actual[1].cpu(), expected[1])


def check_strided_sources() -> None:
    dense = normal(8, 96)
    expected = reference.prepare_input(dense, 16)
    padded = torch.full((8, 200), torch.nan)
    padded[:, 3:99] = dense
    for source in (dense.t().contiguous().t(), padded[:, 3:99]):
        assert not source.is_contiguous()
        assert_prepared(prepare(source, 16), expected)


def exact(x, x_scale, projections, dtype):
    """Sum in int64, scale and bias in FP32, round once."""
    parts = []
    for qdata, scale, bias in projections:
        sums = x.long() @ qdata.long().t()
        assert sums.abs().max() < 2**31
        values = (sums.float() * x_scale[:, None]) * scale.view(1, -1)
        parts.append((values if bias is None else values + bias.float()).to(dtype))
    return torch.cat(parts, 1)


def check_products(plans) -> None:
    shapes = [(1, 8, 16), (7, 33, 48), (33, 70, 208), (127, 20, 80), (129, 31, 64)]
    if DEVICE == "cuda":
        shapes += [(1000, 257, 1040), (31, 4096, 2048)]
    for index, (rows, columns, depth) in enumerate(shapes):
        x = codes(rows, depth + 3)[:, :depth]
        x_scale = torch.rand(rows, generator=generator)
        x_scale[rows // 2] = 0
        biases = [normal(2 * columns)[::2].half(), normal(columns), None]
        first, second = (
            (codes(columns, depth), torch.rand(columns, 1), biases[(index + i) % 3]) for i in (0, 1)
        )
        for plan in plans:
            for pair in (None, second):
                both = [first] if pair is None else [first, pair]
                dtype = OUTPUTS[index % len(OUTPUTS)]
                width = columns * len(both)
                guard = torch.full((rows + 2, width + 5), torch.nan, dtype=dtype, device=DEVICE)
                out = guard[1:-1, :width]
                operands = [tuple(moved(part) for part in item) for item in both]
                _launch.matmul(
                    moved(x), moved(x_scale), operands[0], operands[1] if pair else None, out, plan
                )
                expected = exact(x, x_scale, both, dtype)
                assert torch.equal(out.cpu(), expected), (rows, columns, depth, plan)
                guard[1:-1, :width] = torch.nan
                assert guard.isnan().all()


def check_backend() -> None:
    backend = TritonBackend()
    x = normal(2, 3, 128).half()
    weights = [(codes(9, 64), torch.rand(9, 1), normal(9)), (codes(9, 64), torch.rand(9, 1), None)]
    qdata = torch.empty((2, 3, 64), dtype=torch.int8, device=DEVICE)
    scale = torch.empty((2, 3), dtype=torch.float32, device=DEVICE)
    out = backend.prepare_input(moved(x), 16, "swiglu", out=(qdata, scale))
    assert out[0] is qdata
    assert out[1] is scale
    assert_prepared(out, reference.prepare_input(x, 16, "swiglu"), 2e-5)
    first, second = (tuple(moved(part) for part in weight) for weight in weights)
    rows = torch.full((2, 3, 40), torch.nan, dtype=torch.float16, device=DEVICE)
    target = rows[..., :18]
    result = backend.linear_prepared(
        qdata, scale, *first, torch.float16, out=target, second_projection=second
    )
    assert result is target
    flat = qdata.cpu().view(6, 64), scale.cpu().view(6)
    assert torch.equal(result.cpu().reshape(6, 18), exact(*flat, weights, torch.float16))
    assert rows[..., 18:].isnan().all()
    alone = backend.linear_prepared(qdata, scale, *first, torch.float16)
    assert torch.equal(alone, result[..., :9])
    whole = backend.linear(moved(x), *first, 16, "swiglu")
    assert torch.equal(whole, alone)


def check_misaligned_storage() -> None:
    backend = TritonBackend()
    x = normal(5, 64)
    storage = torch.zeros(9 * 64 + 1, dtype=torch.int8, device=DEVICE)
    weight = storage[1:].view(9, 64)
    weight.copy_(codes(9, 64))
    scale = torch.rand(9, 1)
    out = torch.zeros(5 * 64 + 3, dtype=torch.int8, device=DEVICE)[3:].view(5, 64)
    scales = torch.empty(5, device=DEVICE)
    qdata, row_scale = backend.prepare_input(moved(x), 64, out=(out, scales))
    assert_prepared((qdata, row_scale), reference.prepare_input(x, 64))
    result = backend.linear_prepared(qdata, row_scale, weight, moved(scale), None, torch.float32)
    projection = (weight.cpu(), scale, None)
    expected = exact(qdata.cpu(), row_scale.cpu(), [projection], torch.float32)
    assert torch.equal(result.cpu(), expected)


def check_mean() -> None:
    backend = TritonBackend()
    qdata, scale = codes(2, 640, 130), torch.rand(2, 640, generator=generator)
    lengths = torch.randint(1, 65, (10,), generator=generator, dtype=torch.int32)
    values = qdata.double() * scale[..., None]
    valid = torch.arange(64) < lengths[:, None]
    for blocks, expected in (
        (None, values.mean(1)),
        (lengths, values[:, valid.flatten()].mean(1)),
    ):
        actual = backend.dequantized_input_mean(moved(qdata), moved(scale), moved(blocks))
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=1e-5, atol=1e-4)


def main() -> None:
    check_preparation()
    check_special_rows()
    check_activation_limits()
    check_integers_are_exact()
    check_strided_sources()
    check_products([SMALL_TILES, SPLIT])
    check_backend()
    check_misaligned_storage()
    check_mean()
    print("kernel checks passed")


if __name__ == "__main__":
    main()
