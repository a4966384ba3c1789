"""Checks of the values of weights and dense tensors."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from piper_kernels.weights.convrot.int8._storage import validate_activation_scale, validate_storage
from piper_kernels.weights.io import RowQuantizedWeight
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
from piper_kernels.weights.nvfp4._layout import BLOCK_SIZE, swizzle_scale, unswizzle_scale
from piper_kernels.weights.nvfp4._storage import matrix_shape, require_decodable
from piper_kernels.weights.validate._findings import Check, Finding

_CHUNK = 1 << 22  # elements looked at together, to bound temporary memory
_SIGNS: dict[Check, Callable[[Tensor], Tensor]] = {
    Check.NAN: torch.isnan,
    Check.INFINITE: torch.isinf,
    Check.ZERO: lambda values: values == 0,
    Check.NEGATIVE: lambda values: values < 0,
}


def check_weight(name: str, weight: Any) -> list[Finding]:
    """Check storage and values of one quantized weight."""
    try:
        _require_storage(weight)
    except ValueError as error:
        return [Finding(name, "", Check.STORAGE, str(error))]
    if weight.scale.device.type == "meta":
        return []
    found = list(_check_codes(name, weight.qdata))
    if isinstance(weight, PiperNVFP4Tensor):
        found += _check_block_scales(name, weight)
        found += _check_scale(name, "per_tensor_scale", weight.per_tensor_scale)
        found += _check_activation_settings(name, weight)
    else:
        found += _check_scale(name, "scale", weight.scale)
    found += _check_scale(name, "act_per_tensor_scale", weight.act_per_tensor_scale)
    return found


def check_dense(name: str, tensor: Tensor) -> list[Finding]:
    """Check a dense tensor for NaN and infinities."""
    if not tensor.is_floating_point() or tensor.device.type == "meta":
        return []
    kinds = (Check.NAN, Check.INFINITE)
    return [Finding(name, "", kind, text) for kind, text in _offences(tensor, kinds)]


def _require_storage(weight: Any) -> None:
    if isinstance(weight, PiperNVFP4Tensor):
        require_decodable(weight)
        return
    if isinstance(weight, RowQuantizedWeight):
        return  # a frozen dataclass: checked when it was built
    validate_storage(weight.qdata, weight.scale, weight.group_size)
    validate_activation_scale(weight.act_per_tensor_scale, weight.qdata.device)


def _check_codes(name: str, qdata: Tensor) -> Iterator[Finding]:
    """FP8 codes have two NaN bytes, 0x7F and 0xFF; INT8 and E2M1 codes are all valid."""
    if qdata.dtype == torch.float8_e4m3fn:
        for kind, text in _offences(qdata, (Check.NAN,)):
            yield Finding(name, "qdata", kind, f"{text} (bytes 0x7F and 0xFF)")


def _check_scale(name: str, field: str, scale: Tensor | None) -> list[Finding]:
    if scale is None:
        return []
    return [Finding(name, field, kind, text) for kind, text in _offences(scale, tuple(_SIGNS))]


def _check_block_scales(name: str, weight: PiperNVFP4Tensor) -> list[Finding]:
    *lead, rows, features = matrix_shape(weight)
    rows *= lead[0] if lead else 1
    stored = weight.scale.t() if weight.transposed and weight.scale.ndim == 2 else weight.scale
    if not weight.is_swizzled_scales:
        return _check_scale(name, "scale", stored)
    plain = unswizzle_scale(stored, rows, features // BLOCK_SIZE)
    found = _check_scale(name, "scale", plain)
    raw = stored.contiguous().view(torch.uint8).flatten()
    # Real scales cleared, whatever is left lies in the padding.
    used = swizzle_scale(torch.ones_like(plain, dtype=torch.uint8)).flatten()
    outside = int((raw * (1 - used)).count_nonzero())
    if outside:
        message = f"{outside} bytes outside of the {rows} x {features} matrix are not zero"
        found.append(Finding(name, "scale", Check.PADDING, message))
    return found


def _check_activation_settings(name: str, weight: PiperNVFP4Tensor) -> list[Finding]:
    settings = weight.act_quant_kwargs
    if (
        settings is None
        or settings.use_dynamic_per_tensor_scale
        or weight.per_tensor_scale is None
        or weight.act_per_tensor_scale is not None
    ):
        return []
    message = (
        "inputs are to be quantized with a static second-level scale, but there is no "
        "act_per_tensor_scale; store one or set use_dynamic_per_tensor_scale"
    )
    return [Finding(name, "act_per_tensor_scale", Check.STORAGE, message)]


def _offences(tensor: Tensor, kinds: tuple[Check, ...]) -> Iterator[tuple[Check, str]]:
    """Yield the kinds of bad values in a tensor, with their number and the first place."""
    flat = tensor.detach().reshape(-1)
    counts, first = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
    for start in range(0, flat.numel(), _CHUNK):
        values = flat[start : start + _CHUNK]
        if values.element_size() == 1:
            values = values.to(torch.float32)
        for kind in kinds:
            hits = _SIGNS[kind](values)
            number = int(hits.count_nonzero())
            if number and not counts[kind]:
                first[kind] = start + int(hits.to(torch.uint8).argmax())
            counts[kind] += number
    for kind in kinds:
        if counts[kind]:
            index = torch.unravel_index(torch.tensor(first[kind]), tensor.shape)
            place = f", first at {[int(axis) for axis in index]}" if tensor.ndim else ""
            yield kind, f"{counts[kind]} of {flat.numel()} values are {kind}{place}"
