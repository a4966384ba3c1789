import pytest
import torch

from piper_kernels.linear.convrot.int8 import reference
from piper_kernels.linear.convrot.int8._outputs import allocate_or_check, check_prepared
from piper_kernels.linear.convrot.int8._portable import PortableBackend

CPU = torch.device("cpu")
backend = PortableBackend()


def operands(lead=(2, 3), features=64, columns=7):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(*lead, features, generator=generator).bfloat16()
    weights = [
        (
            torch.randint(-128, 128, (columns, features), generator=generator, dtype=torch.int8),
            torch.rand(columns, 1, generator=generator),
            bias,
        )
        for bias in (torch.randn(2 * columns, generator=generator)[::2].half(), None)
    ]
    return x, *weights


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (0,), (3, 0)])
def test_pairs_append_the_second_projection(lead):
    x, first, second = operands(lead)
    prepared = backend.prepare_input(x, 16)
    paired = backend.linear_prepared(*prepared, *first, x.dtype, second_projection=second)
    one, two = (backend.linear_prepared(*prepared, *w, x.dtype) for w in (first, second))
    assert torch.equal(paired, torch.cat([one, two], -1))
    assert torch.equal(one, backend.linear(x, *first, 16))


@pytest.mark.parametrize("pair", [False, True])
def test_outputs_may_be_rows_of_a_larger_tensor(pair):
    x, first, second = operands()
    prepared = backend.prepare_input(x, 16)
    options = {"second_projection": second} if pair else {}
    expected = backend.linear_prepared(*prepared, *first, torch.float16, **options)
    columns = expected.shape[-1]
    whole = torch.full((2, 3, columns + 4), torch.nan, dtype=torch.float16)
    out = whole[..., 1 : columns + 1]
    result = backend.linear_prepared(*prepared, *first, torch.float16, out=out, **options)
    assert result is out
    assert torch.equal(out, expected)
    assert whole[..., 0].isnan().all()
    assert whole[..., columns + 1 :].isnan().all()


@pytest.mark.parametrize("static", [None, torch.tensor(0.1)])
def test_preparations_write_into_the_outputs(static):
    x, _, _ = operands()
    out = torch.full((2, 3, 64), 99, dtype=torch.int8), torch.full((2, 3), torch.nan)
    result = backend.prepare_input(x, 16, "gelu_tanh", static, out=out)
    assert result[0] is out[0]
    assert result[1] is out[1]
    expected = reference.prepare_input(x, 16, "gelu_tanh", static)
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


@pytest.mark.parametrize(
    ("out", "fragment"),
    [
        (torch.empty(6, 7), "shape"),
        (torch.empty(2, 3, 7, dtype=torch.float16), "must be torch.float32"),
        (torch.empty(2, 3, 7, device="meta"), "on cpu"),
        (torch.empty(2, 7, 3).transpose(1, 2), "side by side"),
        (torch.empty(3, 2, 7).transpose(0, 1), "fixed distance"),
    ],
)
def test_unfit_outputs_are_refused(out, fragment):
    with pytest.raises(ValueError, match=fragment):
        allocate_or_check(out, (2, 3, 7), torch.float32, CPU)
    x, first, _ = operands()
    with pytest.raises(ValueError, match=fragment):
        backend.linear_prepared(*backend.prepare_input(x, 16), *first, torch.float32, out=out)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        (0, torch.empty(2, 3, 64)),
        (0, torch.empty(2, 64, 3, dtype=torch.int8).transpose(1, 2)),
        (0, torch.empty(6, 64, dtype=torch.int8)),
        (1, torch.empty(2, 3, dtype=torch.float16)),
        (1, torch.empty(2, 3, 1)),
        (1, torch.empty(2, 3, device="meta")),
    ],
)
def test_unfit_prepared_outputs_are_refused(part, value):
    out = [torch.empty(2, 3, 64, dtype=torch.int8), torch.empty(2, 3)]
    check_prepared(tuple(out), (2, 3, 64), CPU)
    out[part] = value
    with pytest.raises(ValueError, match=("codes", "scales")[part]):
        backend.prepare_input(operands()[0], 16, out=tuple(out))


def test_second_projections_have_the_shape_of_the_first():
    x, first, _ = operands()
    other = (first[0][:5], first[1][:5], None)
    with pytest.raises(ValueError, match="second projection"):
        backend.linear_prepared(
            *backend.prepare_input(x, 16), *first, x.dtype, second_projection=other
        )


def test_means_leave_padded_rows_out():
    generator = torch.Generator().manual_seed(3)
    qdata = torch.randint(-128, 128, (2, 192, 5), generator=generator, dtype=torch.int8)
    scale = torch.rand(2, 192, generator=generator)
    lengths = torch.tensor([64, 1, 17], dtype=torch.int32)
    values = qdata.double() * scale[..., None]
    kept = torch.cat([values[:, :64], values[:, 64:65], values[:, 128:145]], 1)
    spoiled = scale.clone()
    spoiled[:, 145:] = torch.nan
    for actual, expected in (
        (backend.dequantized_input_mean(qdata, scale), values.mean(1)),
        (backend.dequantized_input_mean(qdata, spoiled, lengths), kept.mean(1)),
    ):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)
