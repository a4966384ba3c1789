"""Cuts whole checkpoint tensors into the parts that a layer holds."""

from collections.abc import Iterator

import torch
from torch import nn

from phyai_quant.scheme import QuantConfigError
from phyai_quant.specs import loading


def local_parts(
    layer: nn.Module,
    name: str,
    loaded: torch.Tensor,
    legs: range,
    *,
    rows_per_entry: int = 1,
    columns_per_entry: int | None = 1,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields where each leg's part of a checkpoint tensor goes, and the part.

    The tensor is that of one leg, or of consecutive legs stacked along N, in full:
    ``[ceil(rows / rows_per_entry), ceil(columns / columns_per_entry)]``.

    Args:
        layer: The layer, allocated.
        name: Name of the checkpoint tensor, for messages.
        loaded: The tensor.
        legs: Indices of the legs it holds.
        rows_per_entry: Rows of the weight that one row of the tensor stands for: N block of a
            scale, values in a word that is packed along N.
        columns_per_entry: Columns of the weight that one column of the tensor stands for: group
            or K block of a scale, values in a byte or word; None for a tensor that has one entry
            per row (``[rows]`` or ``[rows, 1]``, yielded as ``[rows]``).

    Returns:
        Pairs of the entries along N in the layer's tensor and the 2-D (or, without columns,
        1-D) part; the parts are views.

    Raises:
        QuantConfigError: The shape is not that of the whole tensor, or a leg or a slice begins or
            ends inside an entry.
    """
    parts = whole_legs(
        layer,
        name,
        loaded,
        legs,
        rows_per_entry=rows_per_entry,
        columns_per_entry=columns_per_entry,
    )
    for leg, whole in parts:
        yield _cut_leg(layer, name, whole, leg, rows_per_entry, columns_per_entry)


def whole_legs(
    layer: nn.Module,
    name: str,
    loaded: torch.Tensor,
    legs: range,
    *,
    rows_per_entry: int = 1,
    columns_per_entry: int | None = 1,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields index and whole tensor of every leg in a checkpoint tensor; see `local_parts`.

    Raises:
        QuantConfigError: The shape is not that of the whole tensor.
    """
    request = loading.load_state(layer).request
    heights = [_entries(request.slices[leg].full_shape[0], rows_per_entry) for leg in legs]
    _check_shape(layer, name, loaded, sum(heights), legs, columns_per_entry)
    if columns_per_entry is None:
        loaded = loaded.reshape(loaded.shape[0])
    start = 0
    for leg, height in zip(legs, heights, strict=True):
        yield leg, loaded[start : start + height]
        start += height


def check_slices(
    layer: nn.Module, name: str, *, rows_per_entry: int = 1, columns_per_entry: int = 1
) -> None:
    """Checks while allocating what `local_parts` would find when the tensor ``name`` is read.

    Raises:
        QuantConfigError: A leg or a slice begins or ends inside an entry.
    """
    request = loading.load_state(layer).request
    for leg in range(len(request.logical_widths)):
        _leg_rows(layer, name, leg, rows_per_entry)
        _leg_columns(layer, name, leg, columns_per_entry)


def _cut_leg(
    layer: nn.Module,
    name: str,
    whole: torch.Tensor,
    leg: int,
    rows_per_entry: int,
    columns_per_entry: int | None,
) -> tuple[slice, torch.Tensor]:
    target, source = _leg_rows(layer, name, leg, rows_per_entry)
    cut = whole[source]
    if columns_per_entry is not None:
        cut = cut[:, _leg_columns(layer, name, leg, columns_per_entry)]
    return target, cut


def _leg_rows(layer: nn.Module, name: str, leg: int, per_entry: int) -> tuple[slice, slice]:
    """Returns the entries along N of a leg: in the layer's tensor and in the checkpoint's."""
    state = loading.load_state(layer)
    held, part = state.rows(leg), state.request.slices[leg]
    width, rows = held.stop - held.start, state.request.weight_shape[0]
    return (
        _span(layer, name, leg, held.start, width, rows, per_entry),
        _span(layer, name, leg, part.row_start, width, part.full_shape[0], per_entry),
    )


def _leg_columns(layer: nn.Module, name: str, leg: int, per_entry: int) -> slice:
    """Returns the entries along K of a leg in the checkpoint's tensor."""
    request = loading.load_state(layer).request
    part, columns = request.slices[leg], request.weight_shape[1]
    return _span(layer, name, leg, part.column_start, columns, part.full_shape[1], per_entry)


def _span(
    layer: nn.Module, name: str, leg: int, start: int, size: int, full: int, per_entry: int
) -> slice:
    """Returns the entries of ``size`` elements from ``start``; the last entry may be partial."""
    stop = start + size
    if start % per_entry or (stop % per_entry and stop != full):
        ids = loading.load_state(layer).request.shard_ids
        where = f"leg {ids[leg]!r}, " if len(ids) > 1 else ""
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: {where}elements {start} to {stop} of {full} do not fit "
            f"the entries of {name!r}, which stand for {per_entry} each; use a degree of tensor "
            "parallelism or leg widths that are multiples, or keep the layer unquantized"
        )
    return slice(start // per_entry, _entries(stop, per_entry))


def _check_shape(
    layer: nn.Module,
    name: str,
    loaded: torch.Tensor,
    rows: int,
    legs: range,
    columns_per_entry: int | None,
) -> None:
    if columns_per_entry is None:
        shapes = [[rows], [rows, 1]]
    else:
        columns = loading.load_state(layer).request.slices[legs.start].full_shape[1]
        shapes = [[rows, _entries(columns, columns_per_entry)]]
    if list(loaded.shape) not in shapes:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: checkpoint tensor {name!r} has shape "
            f"{list(loaded.shape)}, the layer expects {' or '.join(map(str, shapes))}"
        )


def _entries(size: int, per_entry: int) -> int:
    return -(-size // per_entry)
