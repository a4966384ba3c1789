"""The fixture ``nan_filled_allocations``: every allocator that it covers, every kind of dtype."""

import pytest
import torch

ALLOCATORS = {
    "empty": lambda dtype: torch.empty(3, 5, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(3, 5, dtype=dtype)),
    "empty_strided": lambda dtype: torch.empty_strided((3, 5), (1, 3), dtype=dtype),
    "new_empty": lambda dtype: torch.zeros(1).new_empty((3, 5), dtype=dtype),
    "new_empty_strided": lambda dtype: torch.zeros(1).new_empty_strided(
        (3, 5), (7, 1), dtype=dtype
    ),
}


@pytest.fixture(params=ALLOCATORS)
def allocate(request: pytest.FixtureRequest):
    return ALLOCATORS[request.param]


FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
INTEGER = [torch.int8, torch.uint8, torch.int32, torch.int64]


@pytest.mark.usefixtures("nan_filled_allocations")
@pytest.mark.parametrize("dtype", FLOATING + FLOAT8, ids=str)
def test_floats_are_nan(allocate, dtype):
    assert allocate(dtype).to(torch.float32).isnan().all()


@pytest.mark.usefixtures("nan_filled_allocations")
@pytest.mark.parametrize("dtype", INTEGER, ids=str)
def test_integers_are_extreme(allocate, dtype):
    assert (allocate(dtype) == torch.iinfo(dtype).max).all()


@pytest.mark.usefixtures("nan_filled_allocations")
def test_bool_is_true_and_complex_is_nan(allocate):
    assert allocate(torch.bool).all()
    assert allocate(torch.complex64).isnan().all()


@pytest.mark.usefixtures("nan_filled_allocations")
def test_packed_fp4_is_filled_through_its_bytes():
    packed = torch.empty(5, dtype=torch.float4_e2m1fn_x2)
    assert (packed.view(torch.uint8) == 0xFF).all()


@pytest.mark.usefixtures("nan_filled_allocations")
def test_an_unwritten_element_is_seen():
    source = torch.arange(7.0)
    copied = torch.empty_like(source)
    copied[:6] = source[:6]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(copied, source)


@pytest.mark.usefixtures("nan_filled_allocations")
def test_a_parameter_leaf_can_be_allocated():
    assert torch.empty(3, requires_grad=True).isnan().all()


def test_allocators_are_themselves_again(request: pytest.FixtureRequest):
    before = torch.empty, torch.empty_like, torch.empty_strided
    request.getfixturevalue("nan_filled_allocations")
    assert torch.empty is not before[0]
    request.getfixturevalue("monkeypatch").undo()
    assert (torch.empty, torch.empty_like, torch.empty_strided) == before
    assert "new_empty" not in vars(torch.Tensor)
