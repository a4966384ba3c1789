"""Shapes, loading and expansion of the scales of FP8 weights and activations."""

from typing import cast

import torch
from torch import nn

from phyai_quant.scheme import Granularity, QuantConfigError, TensorQuant
from phyai_quant.specs import base

WEIGHT_SCALE_NAMES = ("weight_scale", "weight_scale_inv")
"""Checkpoint names of the weight scale; both hold the multiplier that dequantizes."""

_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


def allocated_shape(layer: nn.Module, weight: TensorQuant) -> tuple[int, ...]:
    """Returns the shape of ``weight_scale`` while loading; legs must start on block boundaries."""
    request = base.load_state(layer).request
    rows, columns = request.weight_shape
    if weight.granularity is Granularity.PER_TENSOR:
        return (len(request.logical_widths),)
    if weight.block_shape is None:
        return (rows,)
    block_n, block_k = weight.block_shape
    for shard_id, width in zip(request.shard_ids[:-1], request.logical_widths[:-1], strict=True):
        if width % block_n:
            raise QuantConfigError(
                f"{base.layer_name(layer)}: leg {shard_id!r} has {width} rows, which is not a "
                f"multiple of the {block_n} rows of a scale block; only the last leg may end "
                "inside a block"
            )
    return (_blocks(rows, block_n), _blocks(columns, block_k))


def load_weight_scale(
    layer: nn.Module, name: str, loaded: torch.Tensor, legs: range, weight: TensorQuant
) -> None:
    """Copies the weight scale of consecutive legs to its place.

    A per_tensor scalar goes to the slot of each leg. A per_channel scale is ``[w]``, ``[w, 1]`` or
    a scalar for all rows of the leg. A block scale is ``[ceil(w/bn), ceil(K/bk)]``.
    """
    state = base.load_state(layer)
    if any(("weight_scale", leg) in state.loaded for leg in legs):
        raise QuantConfigError(
            f"{base.layer_name(layer)}: the weight scale is loaded twice, now as {name!r}; the "
            f"checkpoint must hold one of {' and '.join(WEIGHT_SCALE_NAMES)} per layer"
        )
    values = _to_fp32(layer, name, loaded)
    rows = base.row_span(layer, legs)
    width = rows.stop - rows.start
    if weight.granularity is Granularity.PER_TENSOR:
        target, shapes = slice(legs.start, legs.stop), [(), (1,), (1, 1)]
    elif weight.block_shape is None:
        target, shapes = rows, [(width,), (width, 1), (), (1,), (1, 1)]
    else:
        block_n, block_k = weight.block_shape
        first = rows.start // block_n
        target = slice(first, first + _blocks(width, block_n))
        shapes = [(_blocks(width, block_n), _blocks(state.request.weight_shape[1], block_k))]
    _check_shape(layer, name, values, shapes)
    if weight.block_shape is None:
        values = values.reshape(-1)
    with torch.no_grad():
        cast("nn.Parameter", layer.weight_scale)[target].copy_(values)


def load_input_scale(layer: nn.Module, loaded: torch.Tensor) -> None:
    """Keeps the largest input scale of the legs, which all saw the same input."""
    values = _to_fp32(layer, "input_scale", loaded)
    _check_shape(layer, "input_scale", values, [(), (1,), (1, 1)])
    target = cast("nn.Parameter", layer.input_scale)
    with torch.no_grad():
        # fmax ignores the NaN of a scale that is not loaded yet
        target.copy_(torch.fmax(target, values.reshape(1).to(target.device)))


def expand_blocks(
    scale: torch.Tensor, block_shape: tuple[int, int], shape: torch.Size
) -> torch.Tensor:
    """Repeats block scales ``[ceil(N/bn), ceil(K/bk)]`` to ``[N, K]``."""
    wide = scale.repeat_interleave(block_shape[0], 0).repeat_interleave(block_shape[1], 1)
    return wide[: shape[0], : shape[1]]


def group_maxima(rows: torch.Tensor, activation: TensorQuant) -> torch.Tensor:
    """Returns the largest magnitudes of ``rows`` ``[M, K]`` that share a dynamic scale.

    Returns:
        ``[1]`` per tensor, ``[M]`` per token, ``[M, ceil(K/g)]`` for groups of g along K.
    """
    magnitudes = rows.abs()
    if activation.block_shape is not None:
        group = activation.block_shape[1]
        padded = nn.functional.pad(magnitudes, (0, -rows.shape[1] % group))
        return padded.unflatten(1, (-1, group)).amax(dim=2)
    if activation.granularity is Granularity.PER_CHANNEL:
        return magnitudes.amax(dim=1)
    if rows.numel() == 0:
        return rows.new_zeros(1)
    return magnitudes.amax().reshape(1)


def expand_activation_scale(
    scale: torch.Tensor, rows: torch.Tensor, activation: TensorQuant
) -> torch.Tensor:
    """Returns activation scales in a shape that divides ``rows`` ``[M, K]``."""
    if activation.block_shape is not None:
        return expand_blocks(scale, activation.block_shape, rows.shape)
    return scale[:, None]


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _to_fp32(layer: nn.Module, name: str, loaded: torch.Tensor) -> torch.Tensor:
    if loaded.dtype not in _SCALE_DTYPES:
        raise QuantConfigError(
            f"{base.layer_name(layer)}: checkpoint tensor {name!r} is {loaded.dtype}; "
            f"allowed: {', '.join(map(str, _SCALE_DTYPES))}"
        )
    return loaded.float()


def _check_shape(
    layer: nn.Module, name: str, values: torch.Tensor, shapes: list[tuple[int, ...]]
) -> None:
    if tuple(values.shape) not in shapes:
        raise QuantConfigError(
            f"{base.layer_name(layer)}: checkpoint tensor {name!r} has shape "
            f"{list(values.shape)}, the layer expects "
            f"{' or '.join(str(list(shape)) for shape in dict.fromkeys(shapes))}"
        )
