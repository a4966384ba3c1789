"""Replacement of a model's convolutions by ConvRot INT8 ones."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from piper_kernels.conv3d.convrot.int8 import ConvRotInt8Conv3d
from piper_kernels.conv3d.convrot.int8._geometry import Padding
from piper_kernels.specializations.minimax_h3_vae.conv3d.scales import (
    default_group_size,
    require_module,
)
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

_KERNEL = (3, 3, 3)


def quantize_convolutions(
    model: nn.Module,
    scales: Mapping[str, float],
    *,
    names: tuple[str, ...] | None = None,
    padding: Padding | Callable[[str], Padding] = "none",
    group_size: Callable[[int], int] | None = None,
) -> nn.Module:
    """Replace causal 3x3x3 convolutions of a model in place.

    A replaced module has ``weight [O, C, 3, 3, 3]``, ``bias`` and ``stride``; it pads its input in
    front with two frames of zeros and nothing else, as the one that replaces it does. Its first
    two arguments are the input and, if it takes one, a residual.

    Args:
        model: The encoder.
        scales: Activation scale by name, such as an ``ActivationScales``.
        names: Convolutions to replace; those of ``scales`` when omitted.
        padding: Spatial padding that the new modules apply, of all or by name: ``"none"`` where
            the model pads outside of its convolutions, which the compiler then absorbs.
        group_size: Rotation group by input channels; ``default_group_size`` when omitted.

    Returns:
        The model.

    Raises:
        KeyError: A scale or a module is missing.
        ValueError: There is nothing to replace, or a module is no such convolution.
    """
    chosen = tuple(scales) if names is None else names
    if not chosen:
        raise ValueError(
            "the table of activation scales is empty; measure one with "
            "calibrate_activation_scales(model, batches)"
        )
    numbers = {name: scales[name] for name in chosen}
    groups = group_size or default_group_size
    modules = dict(model.named_modules())
    found = {name: _require_convolution(name, require_module(modules, name)) for name in chosen}
    for name, module in found.items():
        weight: Tensor = module.weight
        packed = ConvRotInt8Tensor.from_hp(
            weight,
            group_size=groups(weight.shape[1]),
            act_per_tensor_scale=torch.tensor(
                numbers[name], dtype=torch.float32, device=weight.device
            ),
        )
        bias = None if module.bias is None else module.bias.detach().to(torch.float16)
        kind: Padding = padding(name) if callable(padding) else padding
        replacement = ConvRotInt8Conv3d(packed, bias, stride=tuple(module.stride), padding=kind)
        parent, _, attribute = name.rpartition(".")
        setattr(modules[parent], attribute, replacement.train(module.training))
    return model


def _require_convolution(name: str, module: Any) -> Any:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or tuple(weight.shape[2:]) != _KERNEL:
        shape = tuple(weight.shape) if isinstance(weight, Tensor) else None
        raise ValueError(
            f"{name} must be a convolution with a weight [O, C, 3, 3, 3], got "
            f"{type(module).__name__} with a weight of shape {shape}"
        )
    for attribute, allowed in (("dilation", (1, 1, 1)), ("groups", 1)):
        value = getattr(module, attribute, allowed)
        if value != allowed:
            raise ValueError(f"{name} must have {attribute} {allowed}, got {value}")
    if len(tuple(module.stride)) != 3:
        raise ValueError(f"{name} must have a stride of three numbers, got {module.stride}")
    return module
