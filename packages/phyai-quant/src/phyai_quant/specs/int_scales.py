"""Scales, zero points and group order of integer weights."""

from typing import cast

import torch
from torch import nn

from phyai_quant.scheme import Granularity, QuantConfigError, TensorQuant
from phyai_quant.specs import int_codes, loading
from phyai_quant.specs.slicing import check_slices, local_parts

_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCALAR_SHAPES = ((), (1,), (1, 1))


def allocate(layer: nn.Module, weight: TensorQuant) -> None:
    """Registers the scale, and what an asymmetric weight or an activation order add.

    ``weight_scale`` fp32 and ``weight_zero_point`` int8 are ``[N]`` for per_tensor (the scalar of
    each leg on its rows) and per_channel, ``[ceil(N/bn), ceil(K/bk)]`` for blocks.
    ``weight_g_idx`` int32 ``[L, K]`` holds the group of each column for each of the L legs.

    Raises:
        QuantConfigError: K is not a multiple of the group size; legs or slices of a rank do not
            fit the blocks; an activation order with K sliced.
    """
    request = loading.load_state(layer).request
    rows, columns = request.weight_shape
    shape: tuple[int, ...] = (rows,)
    if weight.block_shape is not None:
        block_n, block_k = weight.block_shape
        _check_groups(layer, block_n, block_k)
        shape = (-(-rows // block_n), -(-columns // block_k))
    device = request.device
    _register(layer, "weight_scale", torch.full(shape, torch.nan, device=device))
    if not weight.symmetric:
        zeros = torch.zeros(shape, dtype=torch.int8, device=device)
        _register(layer, "weight_zero_point", zeros)
    if weight.act_order:
        _check_unsliced(layer)
        order = torch.zeros(len(request.shard_ids), columns, dtype=torch.int32, device=device)
        _register(layer, "weight_g_idx", order)


def load_scale(layer: nn.Module, loaded: torch.Tensor, legs: range, weight: TensorQuant) -> None:
    """Copies the scale of consecutive legs to its place.

    per_tensor: a scalar, or one value per leg. per_channel: ``[rows]``, ``[rows, 1]`` or a scalar.
    Blocks: ``[ceil(rows/bn), ceil(K/bk)]``.
    """
    int_codes.check_tensor(layer, "weight_scale", loaded, dtypes=_SCALE_DTYPES)
    _copy(layer, "weight_scale", loaded, legs, weight)


def load_zero_point(
    layer: nn.Module, loaded: torch.Tensor, legs: range, weight: TensorQuant, bits: int
) -> None:
    """Copies the zero point of consecutive legs to its place.

    int8: signed values in the shape of the scale. int32: offset-binary values of per_channel or
    (1, g) groups, packed along N into ``[ceil(rows * bits / 32), groups]``. A symmetric weight
    takes zeros only.
    """
    name = "weight_zero_point"
    int_codes.check_tensor(layer, name, loaded, dtypes=(torch.int8, torch.int32))
    if loaded.dtype == torch.int32:
        loaded = _unpack_rows(layer, name, loaded, legs, weight, bits)
    int_codes.check_codes(layer, name, loaded, bits)
    if weight.symmetric:
        if loaded.any():
            raise QuantConfigError(
                f"{loading.layer_name(layer)}: {name!r} holds values other than 0, but the config "
                "says symmetric; set symmetric to false for these weights"
            )
        return
    _copy(layer, name, loaded, legs, weight)


def load_group_order(
    layer: nn.Module, loaded: torch.Tensor, legs: range, weight: TensorQuant
) -> None:
    """Copies ``weight_g_idx`` ``[K]``, the group of each column; -1 everywhere is the order of K.

    Raises:
        QuantConfigError: Wrong dtype or shape, or groups that do not each hold as many columns as
            the group size.
    """
    name = "weight_g_idx"
    columns = loading.load_state(layer).request.weight_shape[1]
    int_codes.check_tensor(
        layer, name, loaded, dtypes=(torch.int32, torch.int64), shapes=((columns,),)
    )
    group = _group_size(weight)
    order = loaded.to("cpu", torch.int64)
    if bool((order == -1).all()):
        order = torch.arange(columns) // group
    groups = columns // group
    in_range = bool((order >= 0).all()) and bool((order < groups).all())
    if not in_range or not bool((torch.bincount(order, minlength=groups) == group).all()):
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: {name!r} must name each of the groups 0 to {groups - 1} "
            f"for exactly {group} columns; the checkpoint is damaged or its group_size is not "
            f"{group}"
        )
    with torch.no_grad():
        cast("nn.Parameter", layer.weight_g_idx)[legs.start : legs.stop].copy_(order)


def dequantize(layer: nn.Module, codes: torch.Tensor, weight: TensorQuant) -> torch.Tensor:
    """Returns ``(codes - zero point) * scale`` in fp32 for signed codes ``[N, K]``."""
    values = codes.float()
    if not weight.symmetric:
        values -= _expand(layer, cast("nn.Parameter", layer.weight_zero_point), weight)
    return values.mul_(_expand(layer, cast("nn.Parameter", layer.weight_scale), weight))


def _expand(layer: nn.Module, entries: torch.Tensor, weight: TensorQuant) -> torch.Tensor:
    """Repeats scales or zero points so that they broadcast over ``[N, K]``."""
    entries = entries.detach().float()
    if weight.block_shape is None:
        return entries[:, None]
    state = loading.load_state(layer)
    rows, columns = state.request.weight_shape
    block_n, block_k = weight.block_shape
    if not weight.act_order:
        wide = entries.repeat_interleave(block_n, 0)[:rows]
        return wide.repeat_interleave(block_k, 1)[:, :columns]
    order = cast("nn.Parameter", layer.weight_g_idx)
    legs = range(len(state.request.shard_ids))
    return torch.cat([entries[state.rows(leg)].index_select(1, order[leg]) for leg in legs])


def _copy(
    layer: nn.Module, name: str, loaded: torch.Tensor, legs: range, weight: TensorQuant
) -> None:
    target = cast("nn.Parameter", getattr(layer, name))
    state = loading.load_state(layer)
    with torch.no_grad():
        if weight.block_shape is not None:
            block_n, block_k = weight.block_shape
            for rows, part in local_parts(
                layer, name, loaded, legs, rows_per_entry=block_n, columns_per_entry=block_k
            ):
                target[rows].copy_(part)
        elif tuple(loaded.shape) in _SCALAR_SHAPES:
            target[loading.row_span(layer, legs)] = loaded.reshape(()).to(target)
        elif weight.granularity is Granularity.PER_TENSOR:
            shapes = (*_SCALAR_SHAPES, *(((len(legs),),) if len(legs) > 1 else ()))
            int_codes.check_tensor(layer, name, loaded, dtypes=(loaded.dtype,), shapes=shapes)
            for leg, value in zip(legs, loaded, strict=True):
                target[state.rows(leg)] = value.to(target)
        else:
            for rows, part in local_parts(layer, name, loaded, legs, columns_per_entry=None):
                target[rows].copy_(part)


def _unpack_rows(
    layer: nn.Module, name: str, loaded: torch.Tensor, legs: range, weight: TensorQuant, bits: int
) -> torch.Tensor:
    if weight.granularity is Granularity.PER_TENSOR or (weight.block_shape or (1, 1))[0] != 1:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: checkpoint tensor {name!r} is torch.int32, which packs "
            f"the zero points of rows, but the weight is {weight.describe()}; allowed: torch.int8"
        )
    rows, columns = int_codes.whole_shape(layer, legs)
    groups = 1 if weight.block_shape is None else columns // weight.block_shape[1]
    int_codes.check_tensor(
        layer,
        name,
        loaded,
        dtypes=(torch.int32,),
        shapes=((int_codes.words_for(rows, bits), groups),),
    )
    return int_codes.unpack(loaded.t(), bits, rows).t()


def _check_groups(layer: nn.Module, block_n: int, block_k: int) -> None:
    request = loading.load_state(layer).request
    sizes = [(part.full_shape[1], "K") for part in request.slices]
    for size, kind in (*sizes, (request.weight_shape[1], "the slice of K")):
        if block_n == 1 and size % block_k:
            raise QuantConfigError(
                f"{loading.layer_name(layer)}: {kind} = {size} is not a multiple of the group "
                f"size {block_k}; allowed: whole groups; quantize with a group size that "
                "divides it, use another degree of tensor parallelism, or keep the layer "
                "unquantized"
            )
    check_slices(layer, "weight_scale", rows_per_entry=block_n, columns_per_entry=block_k)


def _check_unsliced(layer: nn.Module) -> None:
    request = loading.load_state(layer).request
    columns = request.weight_shape[1]
    for part in request.slices:
        if part.full_shape[1] != columns:
            raise QuantConfigError(
                f"{loading.layer_name(layer)}: actorder spreads the groups over all of K, but this "
                f"rank holds columns {part.column_start} to {part.column_start + columns} of "
                f"{part.full_shape[1]}; use one rank for this layer or quantize without actorder "
                "(or with actorder 'weight')"
            )


def _group_size(weight: TensorQuant) -> int:
    assert weight.block_shape is not None
    return weight.block_shape[1]


def _register(layer: nn.Module, name: str, values: torch.Tensor) -> None:
    layer.register_parameter(name, nn.Parameter(values, requires_grad=False))
