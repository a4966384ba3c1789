"""Global scales and swizzled block scales of NVFP4 weights."""

from typing import cast

import torch
from torch import nn

from phyai_quant.scheme import QuantConfigError
from phyai_quant.specs import _fp4, _scales, loading

GLOBAL_NAMES = ("weight_scale_2", "weight_global_scale")
"""Checkpoint names of the global scale: ModelOpt's multiplier, compressed-tensors' reciprocal."""

_BLOCK = 16


def read_tiles(layer: nn.Module, name: str, loaded: torch.Tensor, legs: range) -> torch.Tensor:
    """Returns block scales ``[w, K/16]`` that a checkpoint stores in tiles of 128 x 4."""
    slices = loading.load_state(layer).request.slices
    rows = sum(slices[leg].full_shape[0] for leg in legs)
    columns = slices[legs.start].full_shape[1] // _BLOCK
    shapes = _fp4.swizzled_shapes(rows, columns)
    if tuple(loaded.shape) not in shapes:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: checkpoint tensor {name!r} has shape "
            f"{list(loaded.shape)}, the layer expects swizzled scales: "
            f"{' or '.join(str(list(shape)) for shape in shapes)}"
        )
    _scales.check_dtype(layer, name, loaded, (torch.float8_e4m3fn, torch.uint8))
    return _fp4.unswizzle(loaded, rows, columns)


def load_global(layer: nn.Module, name: str, loaded: torch.Tensor, legs: range) -> None:
    """Keeps a leg's global scale as the checkpoint gives it: multiplier and divisor."""
    _scales.check_first(layer, name, "weight_global_scale", legs, GLOBAL_NAMES)
    value = _scales.scalar(layer, name, loaded)
    is_reciprocal = name in _scales.RECIPROCALS
    span = slice(legs.start, legs.stop)
    with torch.no_grad():
        cast("nn.Parameter", layer.weight_global_scale)[span] = 1.0 if is_reciprocal else value
        cast("nn.Parameter", layer.weight_global_divisor)[span] = value if is_reciprocal else 1.0
    loading.load_state(layer).loaded.update(("weight_global_scale", leg) for leg in legs)


def finish_globals(layer: nn.Module) -> None:
    """Turns ``weight_global_scale`` into multipliers; keeps the divisors only if there are any."""
    scale = cast("nn.Parameter", layer.weight_global_scale)
    divisor = cast("nn.Parameter", layer.weight_global_divisor)
    with torch.no_grad():
        scale.div_(divisor)
        if bool((divisor == 1).all()):
            layer.register_parameter("weight_global_divisor", None)


def with_globals(layer: nn.Module, block_scale: torch.Tensor) -> torch.Tensor:
    """Returns fp32 block scales ``[N, K/16]`` with the global scale of every row's leg.

    A stored reciprocal divides: multiplying by its rounded inverse would change the last bit.
    """
    widths = torch.tensor(
        loading.load_state(layer).request.logical_widths, device=block_scale.device
    )

    def per_row(values: nn.Parameter) -> torch.Tensor:
        return values.detach().repeat_interleave(widths)[:, None]

    scale = block_scale.float()
    multiplied = scale * per_row(cast("nn.Parameter", layer.weight_global_scale))
    divisor = getattr(layer, "weight_global_divisor", None)
    if divisor is None:
        return multiplied
    divisors = per_row(divisor)
    return torch.where(divisors == 1, multiplied, scale / divisors)
