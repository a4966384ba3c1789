"""Raw Humming tensors that wait in CPU memory until a layer is complete."""

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from phyai_quant.scheme import QuantConfigError
from phyai_quant.specs import _packing, _rtn, base, loading
from phyai_quant.specs.humming_format import HummingFormat
from phyai_quant.specs.slicing import local_parts

_CHUNK_ELEMENTS = 4 * 2**20


@dataclass(slots=True)
class HummingStaging:
    """What a layer holds while it is loaded.

    Attributes:
        raw: Raw tensors of the layer's part, on the CPU; see `HummingFormat`.
        pending: Whole high-precision legs that wait for others, by leg.
    """

    raw: dict[str, Tensor]
    pending: dict[int, Tensor] = field(default_factory=dict)


def attach_placeholder(layer: nn.Module, request: base.AllocationRequest) -> None:
    """Registers an empty int32 ``weight`` that marks where the packed one goes."""
    weight = nn.Parameter(
        torch.empty(0, dtype=torch.int32, device=request.device), requires_grad=False
    )
    weight.loader_preserves_dtype = True  # pyright: ignore[reportAttributeAccessIssue]
    layer.register_parameter("weight", weight)
    layer.logical_shape = request.weight_shape  # pyright: ignore[reportArgumentType]


def placeholder_device(layer: nn.Module) -> torch.device:
    """Returns where the layer lives now."""
    return cast("nn.Parameter", layer.weight).device


def register_tensors(layer: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Replaces the placeholder; the new ``weight`` keeps what loaders hung on the old one."""
    kept = vars(layer.weight)
    for name, tensor in tensors.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    for name, value in kept.items():
        setattr(layer.weight, name, value)


def empty_raw(stored: HummingFormat, request: base.AllocationRequest) -> dict[str, Tensor]:
    """Returns raw tensors in CPU memory for a layer's part; scales are NaN until loaded."""
    rows, columns = request.weight_shape
    scale = torch.full(stored.scale_shape(rows, columns), torch.nan)
    return {
        "weight": torch.zeros(rows, columns * stored.bits // 32, dtype=torch.int32),
        "weight_scale": scale.to(stored.scale_dtype(request.params_dtype)),
    }


def load_leg(
    layer: nn.Module, stored: HummingFormat, loaded: Tensor, legs: range, device: torch.device
) -> None:
    """Takes a whole high-precision leg, or a stack of them, and quantizes it when it can.

    A leg is quantized on ``device`` as it arrives. Legs that share a scale wait on the CPU for
    the last of them.
    """
    staging = cast("HummingStaging", layer.humming_staging)
    if not stored.couples_legs:
        _quantize(layer, stored, loaded, legs, device)
        return
    heights = [loading.load_state(layer).request.slices[leg].full_shape[0] for leg in legs]
    everything = loading.legs_of(layer, None)
    if legs == everything:
        _quantize(layer, stored, loaded, legs, device)
        return
    for leg, part in zip(legs, loaded.split(heights), strict=True):
        staging.pending[leg] = part.detach().to("cpu", copy=True)
    if len(staging.pending) == len(everything):
        whole = torch.cat([staging.pending[leg] for leg in everything])
        staging.pending.clear()
        _quantize(layer, stored, whole, everything, device)


def check_new(layer: nn.Module, name: str, loaded: Tensor, legs: range) -> None:
    """Raises QuantConfigError for a leg that was loaded before or has the wrong shape."""
    state = loading.load_state(layer)
    if state.finished:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: the weight is packed already and cannot take {name!r}; "
            "build the model again and load every tensor"
        )
    again = [leg for leg in legs if (name, leg) in state.loaded]
    if again:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: {name!r} of leg {state.request.shard_ids[again[0]]!r} "
            "is loaded twice; the checkpoint must hold it once"
        )
    for _ in local_parts(layer, name, loaded, legs):
        pass


def _quantize(
    layer: nn.Module, stored: HummingFormat, whole: Tensor, legs: range, device: torch.device
) -> None:
    """Quantizes whole legs and keeps the layer's part, so ranks share the scales of a row."""
    try:
        result = _quantize_in_chunks(stored, loading.load_state(layer).request, whole, device)
    except QuantConfigError as error:
        raise QuantConfigError(f"{loading.layer_name(layer)}: {error}") from error
    raw = cast("HummingStaging", layer.humming_staging).raw
    for rows, part in local_parts(layer, "weight", result.codes, legs):
        raw["weight"][rows].copy_(_packing.pack_words(part, stored.bits))
    _keep_scale(layer, stored, result, legs, raw)


def _quantize_in_chunks(
    stored: HummingFormat, request: base.AllocationRequest, whole: Tensor, device: torch.device
) -> _rtn.QuantizedWeight:
    """Quantizes some rows at a time on ``device``: rounding takes fp32 copies of what it rounds.

    Returns:
        uint8 codes ``[N, K]`` and scales, on the CPU.
    """
    block_n = (stored.weight.block_shape or (1, 1))[0]
    rows = max(_CHUNK_ELEMENTS // (whole.shape[1] * block_n), 1) * block_n
    extremes = None
    if stored.couples_legs:
        low, high = torch.aminmax(whole)
        extremes = (low.item(), high.item())
    micro = stored.weight.micro_scaled
    results = [
        _rtn.quantize(
            part.to(device),
            stored.weight,
            scale_dtype=torch.float32 if micro else stored.scale_dtype(request.params_dtype),
            extremes=extremes,
        )
        for part in whole.split(rows)
    ]
    codes = torch.cat([_code_bytes(result.codes, stored).cpu() for result in results])
    shared = stored.scale_type == "tensor"
    scales = [result.scale.cpu() for result in results[: 1 if shared else None]]
    # joined as bytes: not every PyTorch joins scales of 8 bits
    scale = torch.cat([part.view(torch.uint8) for part in scales]).view(scales[0].dtype)
    second = results[0].global_scale
    return _rtn.QuantizedWeight(codes, scale, None if second is None else second.cpu())


def _keep_scale(
    layer: nn.Module,
    stored: HummingFormat,
    result: _rtn.QuantizedWeight,
    legs: range,
    raw: dict[str, Tensor],
) -> None:
    if result.global_scale is not None:
        raw["weight_scale_2"] = result.global_scale
    if stored.scale_type == "tensor":
        raw["weight_scale"].copy_(result.scale)
        return
    if stored.weight.block_shape is None:
        for rows, part in local_parts(layer, "weight", result.scale, legs, columns_per_entry=None):
            raw["weight_scale"][rows, 0].copy_(part)
        return
    block_n, block_k = stored.weight.block_shape
    blocks = local_parts(
        layer, "weight", result.scale, legs, rows_per_entry=block_n, columns_per_entry=block_k
    )
    for rows, part in blocks:
        raw["weight_scale"][rows].copy_(part)


def _code_bytes(codes: Tensor, stored: HummingFormat) -> Tensor:
    """Returns the uint8 codes ``[N, K]`` that words hold."""
    if codes.dtype is torch.int8:
        return _packing.to_unsigned(codes, stored.bits)
    return codes.view(torch.uint8)
