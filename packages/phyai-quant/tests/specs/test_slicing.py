import pytest
import torch

from phyai_quant import QuantConfigError
from phyai_quant.specs import loading
from phyai_quant.specs.base import AllocationRequest, LegSlice
from phyai_quant.specs.slicing import check_slices, local_parts


def attached(make_layer, request):
    layer = make_layer("a.qkv_proj")
    loading.attach_state(layer, request, ("weight",))
    return layer


def cut(layer, loaded, legs, **entries):
    return list(local_parts(layer, "weight", loaded, legs, **entries))


def test_whole_layers_get_the_tensor_itself(make_layer):
    layer = attached(make_layer, AllocationRequest((5, 7), torch.float32))
    loaded = torch.randn(7, 5).t()
    ((rows, part),) = cut(layer, loaded, range(1))
    assert rows == slice(0, 5)
    assert torch.equal(part, loaded)
    assert part.data_ptr() == loaded.data_ptr()


@pytest.mark.parametrize("stacked", [False, True])
def test_legs_take_their_own_rows_and_columns(make_layer, stacked):
    full = {"q": (8, 12), "k": (4, 12), "v": (6, 12)}
    parts = (LegSlice(full["q"], 4, 6), LegSlice(full["k"], 2, 6), LegSlice(full["v"], 3, 6))
    request = AllocationRequest((9, 6), torch.float32, (4, 2, 3), ("q", "k", "v"), slices=parts)
    layer = attached(make_layer, request)
    legs = {name: torch.randn(shape) for name, shape in full.items()}
    if stacked:
        pieces = cut(layer, torch.cat(list(legs.values())), range(3))
    else:
        pieces = [cut(layer, legs[name], range(i, i + 1))[0] for i, name in enumerate(full)]
    assert [rows for rows, _ in pieces] == [slice(0, 4), slice(4, 6), slice(6, 9)]
    expected = [legs["q"][4:8, 6:], legs["k"][2:4, 6:], legs["v"][3:6, 6:]]
    assert all(torch.equal(part, want) for (_, part), want in zip(pieces, expected, strict=True))


@pytest.mark.parametrize("column", [False, True])
def test_entries_per_row(make_layer, column):
    request = AllocationRequest((3, 4), torch.float32, slices=(LegSlice((6, 8), 3, 4),))
    loaded = torch.arange(6.0)
    ((rows, part),) = cut(
        attached(make_layer, request),
        loaded[:, None] if column else loaded,
        range(1),
        columns_per_entry=None,
    )
    assert rows == slice(0, 3)
    assert part.tolist() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("slices", "shape", "want"),
    [
        ((LegSlice((12, 16), 0, 0),), (8, 8), (slice(0, 2), slice(0, 1))),
        ((LegSlice((12, 16), 4, 8),), (8, 8), (slice(1, 3), slice(1, 2))),
        ((LegSlice((10, 20), 8, 16),), (2, 4), (slice(2, 3), slice(2, 3))),  # partial last block
        ((LegSlice((10, 20), 0, 0),), (10, 20), (slice(0, 3), slice(0, 3))),
    ],
)
def test_blocks(make_layer, slices, shape, want):
    layer = attached(make_layer, AllocationRequest(shape, torch.float32, slices=slices))
    full = slices[0].full_shape
    height, width = -(-full[0] // 4), -(-full[1] // 8)
    loaded = torch.randn(height, width)
    ((rows, part),) = cut(layer, loaded, range(1), rows_per_entry=4, columns_per_entry=8)
    assert rows == slice(0, -(-shape[0] // 4))
    assert torch.equal(part, loaded[want])
    check_slices(layer, "weight", rows_per_entry=4, columns_per_entry=8)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (
            AllocationRequest((4, 8), torch.float32, slices=(LegSlice((12, 8), 2),)),
            "elements 2 to 6 of 12 do not fit the entries of 'weight', which stand for 4 each",
        ),
        (
            AllocationRequest((6, 8), torch.float32, slices=(LegSlice((12, 8), 0),)),
            "elements 0 to 6 of 12",
        ),
        (
            AllocationRequest((4, 8), torch.float32, slices=(LegSlice((4, 16), 0, 4),)),
            "elements 4 to 12 of 16 .* stand for 8 each",
        ),
        (
            AllocationRequest((4, 4), torch.float32, slices=(LegSlice((4, 8), 0, 0),)),
            "elements 0 to 4 of 8",
        ),
        (
            AllocationRequest((10, 8), torch.float32, (6, 4), ("gate", "up")),
            "leg 'gate', elements 0 to 6 of 10",
        ),
    ],
)
def test_cuts_inside_an_entry_are_refused(make_layer, request_, text):
    layer = attached(make_layer, request_)
    with pytest.raises(QuantConfigError, match=rf"a\.qkv_proj: {text}.*tensor parallelism"):
        check_slices(layer, "weight", rows_per_entry=4, columns_per_entry=8)
    full = request_.slices[0].full_shape
    loaded = torch.zeros(-(-full[0] // 4), -(-full[1] // 8))
    with pytest.raises(QuantConfigError, match=text):
        cut(layer, loaded, range(1), rows_per_entry=4, columns_per_entry=8)


@pytest.mark.parametrize(
    ("shape", "entries", "text"),
    [
        ((4, 8), {}, r"shape \[4, 8\], the layer expects \[8, 8\]"),
        ((8, 4), {"columns_per_entry": 4}, r"shape \[8, 4\], the layer expects \[8, 2\]"),
        ((8, 8, 1), {}, r"shape \[8, 8, 1\], the layer expects \[8, 8\]"),
        ((1, 8), {"columns_per_entry": None}, r"expects \[8\] or \[8, 1\]"),
        ((), {"columns_per_entry": None}, r"shape \[\], the layer expects \[8\] or \[8, 1\]"),
    ],
)
def test_tensors_that_are_not_whole_are_refused(make_layer, shape, entries, text):
    request = AllocationRequest((4, 8), torch.float32, slices=(LegSlice((8, 8), 4),))
    layer = attached(make_layer, request)
    with pytest.raises(
        QuantConfigError, match=rf"a\.qkv_proj: checkpoint tensor 'weight' .*{text}"
    ):
        cut(layer, torch.zeros(shape), range(1), **entries)


@pytest.mark.parametrize(
    "part", [LegSlice((4, 8), 1), LegSlice((4, 8), -1), LegSlice((8, 8), 0, 1), LegSlice((3, 8))]
)
def test_slices_outside_of_their_leg_are_refused(part):
    with pytest.raises(QuantConfigError, match="does not hold 4 rows and 8 columns of its leg"):
        AllocationRequest((4, 8), torch.float32, slices=(part,))


def test_every_leg_has_a_slice():
    with pytest.raises(QuantConfigError, match="1 slices for 2 legs; give one each"):
        AllocationRequest((4, 8), torch.float32, (2, 2), (0, 1), slices=(LegSlice((2, 8)),))
