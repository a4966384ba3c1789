"""Inputs of integer weights: int8 or fp8 codes with stored or computed scales."""

from typing import cast

import torch
from torch import nn

from phyai_quant.scheme import Granularity, QDType, QuantConfigError, TensorQuant
from phyai_quant.specs import _activations, base, int_codes, loading

SCALE_FLOOR = 1e-30
"""Smallest dynamic scale, so that zeros stay zeros."""

_LOW, _HIGH = int_codes.code_range(8)
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsupported(act: TensorQuant) -> str:
    """Returns why an input cannot be quantized this way, or an empty text."""
    reason = f"input is {act.describe()}; "
    if act.micro_scaled or act.act_order or act.rotation_group is not None:
        return reason + "allowed: fp32 scales in the order of K"
    if act.dtype is QDType.FP8_E4M3:
        if not act.symmetric:
            return reason + "allowed: symmetric fp8_e4m3"
    elif act.dtype is not QDType.INT8:
        return reason + "allowed: int8, fp8_e4m3 or unquantized"
    if not act.dynamic and act.granularity is not Granularity.PER_TENSOR:
        return reason + "a static scale is allowed per_tensor only"
    if act.block_shape is not None and act.block_shape[0] != 1:
        return reason + "allowed block_shape: (1, group along K)"
    return ""


def allocate(layer: nn.Module, act: TensorQuant) -> None:
    """Registers ``input_scale`` fp32 and ``input_zero_point`` int32 of a static input.

    They have one entry per leg until `merge_legs`, then one.
    """
    request = loading.load_state(layer).request
    legs = len(request.shard_ids)
    scale = torch.full((legs,), torch.nan, device=request.device)
    layer.register_parameter("input_scale", nn.Parameter(scale, requires_grad=False))
    if not act.symmetric:
        zeros = torch.zeros(legs, dtype=torch.int32, device=request.device)
        layer.register_parameter("input_zero_point", nn.Parameter(zeros, requires_grad=False))


def load(layer: nn.Module, name: str, loaded: torch.Tensor, legs: range, act: TensorQuant) -> None:
    """Copies a static scale or zero point, a scalar, to the slots of its legs.

    A symmetric input takes zeros only as zero point.
    """
    is_scale = name == "input_scale"
    dtypes = _SCALE_DTYPES if is_scale else (torch.int8, torch.int32)
    int_codes.check_tensor(layer, name, loaded, dtypes=dtypes, shapes=((), (1,), (1, 1)))
    value = loaded.reshape(())
    if not is_scale:
        int_codes.check_codes(layer, name, value, 8)
        if act.symmetric:
            if value.any():
                raise QuantConfigError(
                    f"{loading.layer_name(layer)}: {name!r} is {int(value)}, but the config says "
                    "that the input is symmetric; set symmetric to false for input_activations"
                )
            return
    with torch.no_grad():
        target = cast("nn.Parameter", getattr(layer, name))
        target[legs.start : legs.stop] = value.to(target)


def merge_legs(layer: nn.Module, act: TensorQuant) -> None:
    """Leaves one scale and zero point ``[1]`` that cover the ranges of all legs.

    The legs saw the same input. A symmetric input takes the largest scale; an asymmetric one keeps
    what the legs agree on, else spans from the lowest to the highest value that any leg codes.
    """
    scale = cast("nn.Parameter", layer.input_scale).detach()
    if act.symmetric:
        _replace(layer, "input_scale", scale.amax().reshape(1))
        return
    zero = cast("nn.Parameter", layer.input_zero_point).detach()
    if bool((scale == scale[0]).all()) and bool((zero == zero[0]).all()):
        scale, zero = scale[:1].clone(), zero[:1].clone()
    else:
        lowest = ((_LOW - zero) * scale).amin()
        scale = (((_HIGH - zero) * scale).amax() - lowest).reshape(1) / (_HIGH - _LOW)
        zero = torch.round(_LOW - lowest / scale).clamp(_LOW, _HIGH).to(torch.int32)
    _replace(layer, "input_scale", scale)
    _replace(layer, "input_zero_point", zero)


def quantize(x: torch.Tensor, layer: nn.Module, act: TensorQuant) -> base.ActivationView:
    """Quantizes ``[..., K]`` to codes ``[M, K]``, rounding half to even and saturating.

    A dynamic symmetric scale is ``max|x| / 127``. A dynamic asymmetric one spans
    ``[min(x, 0), max(x, 0)]`` over the 256 codes. Both are at least 1e-30.
    Integer kernels divide by 127; the simulation of compressed-tensors divides by 127.5, which
    saturates the largest value by half a step. fp8 inputs follow `_activations.quantize`.
    """
    scale = zero = None
    if not act.dynamic:
        scale = cast("nn.Parameter", layer.input_scale).detach()
        if not act.symmetric:
            zero = cast("nn.Parameter", layer.input_zero_point).detach()
    if act.dtype is not QDType.INT8:
        return _activations.quantize(x, act, scale)
    rows = x.reshape(-1, x.shape[-1]).float()
    if scale is None:
        scale, zero = _range_of(rows, act)
    quotients = rows / _per_element(scale, rows, act)
    if zero is not None:
        quotients += _per_element(zero, rows, act)
    codes = torch.round(quotients).clamp(_LOW, _HIGH).to(torch.int8)
    return base.ActivationView(codes, scale, act.granularity, zero)


def _range_of(rows: torch.Tensor, act: TensorQuant) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the scale of a dynamic input and, when asymmetric, the code of 0.

    Both are ``[1]`` per tensor, ``[M]`` per token, ``[M, ceil(K/g)]`` for groups of g along K.
    """
    if act.block_shape is not None:
        group = act.block_shape[1]
        sharing = nn.functional.pad(rows, (0, -rows.shape[1] % group)).unflatten(1, (-1, group))
    else:
        sharing = rows if act.granularity is Granularity.PER_CHANNEL else rows.reshape(1, -1)
        # 0 is in every range, also in that of an empty tensor
        sharing = nn.functional.pad(sharing, (0, 1))
    if act.symmetric:
        return (sharing.abs().amax(-1) / _HIGH).clamp_min(SCALE_FLOOR), None
    top, bottom = sharing.amax(-1).clamp_min(0), sharing.amin(-1).clamp_max(0)
    # divided first: the difference of two huge magnitudes may overflow
    scale = (top / (_HIGH - _LOW) - bottom / (_HIGH - _LOW)).clamp_min(SCALE_FLOOR)
    return scale, torch.round(_LOW - bottom / scale).clamp(_LOW, _HIGH).to(torch.int32)


def _per_element(entries: torch.Tensor, rows: torch.Tensor, act: TensorQuant) -> torch.Tensor:
    if act.block_shape is None:
        return entries[:, None]
    return entries.repeat_interleave(act.block_shape[1], 1)[:, : rows.shape[1]]


def _replace(layer: nn.Module, name: str, values: torch.Tensor) -> None:
    layer.register_parameter(name, nn.Parameter(values, requires_grad=False))
