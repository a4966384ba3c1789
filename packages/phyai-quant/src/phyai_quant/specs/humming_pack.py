"""Calls into humming-kernels that pack raw tensors for one GPU."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from phyai_quant.scheme import QDType, QuantConfigError
from phyai_quant.specs import loading
from phyai_quant.specs.humming_format import HummingFormat

_NAMES = {
    QDType.INT4: "int4",
    QDType.INT8: "int8",
    QDType.FP8_E4M3: "float8e4m3",
    QDType.FP8_E5M2: "float8e5m2",
    QDType.NVFP4: "float4e2m1",
    QDType.MXFP4: "float4e2m1",
}
_MICRO_SCALES = {QDType.NVFP4: "float8e4m3", QDType.MXFP4: "float8e8m0"}


def build_schemas(stored: HummingFormat, second_scale: str = "none") -> tuple[Any, Any]:
    """Returns Humming's schemas of weight and input.

    Args:
        stored: What is stored.
        second_scale: What shares ``weight_scale_2``: none, tensor or channel.
    """
    from humming.schema import HummingInputSchema, HummingWeightSchema

    block_n, block_k = stored.weight.block_shape or (0, 0)
    weight = HummingWeightSchema(
        b_dtype=_NAMES[stored.weight.dtype],  # pyright: ignore[reportArgumentType]
        bs_dtype=_MICRO_SCALES.get(stored.weight.dtype),  # pyright: ignore[reportArgumentType]
        weight_scale_group_size=block_k,
        weight_scale_group_size_n=block_n if block_n > 1 else 0,
        weight_scale_type=stored.scale_type,
        weight_scale_2_type=second_scale,
    )
    if stored.activation is None:
        return weight, HummingInputSchema()
    return weight, HummingInputSchema(
        a_dtype=_NAMES[stored.activation.dtype],  # pyright: ignore[reportArgumentType]
        input_quant_mode="dynamic_token",  # pyright: ignore[reportArgumentType]
    )


def pack(
    layer: nn.Module, stored: HummingFormat, raw: dict[str, Tensor], device: torch.device
) -> tuple[Any, dict[str, Tensor]]:
    """Packs a layer's raw tensors on its GPU.

    Args:
        layer: The layer, allocated.
        stored: What is stored.
        raw: ``weight``, ``weight_scale`` and optionally ``weight_scale_2`` (fp32 ``[1]``, or
            ``[N]`` when rows differ), anywhere.
        device: The layer's CUDA device.

    Returns:
        The layer configuration that a product needs, and the packed tensors. The layout depends
        on the GPU and on the library's version.

    Raises:
        QuantConfigError: The device is not an NVIDIA GPU; Humming has no kernel for the shape.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: Humming packs weights on an NVIDIA GPU, but the layer "
            f"is on {device}; build the model on a CUDA device, or for the CPU"
        )
    from humming.transform import prepare_layer_config, transform_humming_tensors

    request = loading.load_state(layer).request
    rows, columns = request.weight_shape
    second = raw.get("weight_scale_2")
    kind = "none" if second is None else ("tensor" if second.numel() == 1 else "channel")
    weight_schema, input_schema = build_schemas(stored, kind)
    with torch.cuda.device(device):
        config = prepare_layer_config(
            shape_n=rows,
            shape_k=columns,
            weight_schema=weight_schema,
            input_schema=input_schema,
            torch_dtype=request.params_dtype,
            device=device,
        )
        check_tiles(layer, config, device)
        moved = {name: tensor.to(device) for name, tensor in raw.items()}
        packed = transform_humming_tensors(config, moved)
    return config, cast("dict[str, Tensor]", packed)


def check_tiles(layer: nn.Module, config: Any, device: torch.device) -> None:
    """Raises QuantConfigError when the GPU's tiles do not divide the layer for every M."""
    from humming.tune import get_heuristics_config

    rows, columns = config.shape_n, config.shape_k
    try:
        intervals = cast("list[Any]", get_heuristics_config(config, device=device))
    except (AssertionError, KeyError, ValueError) as error:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: Humming has no kernel for N = {rows}, K = {columns} on "
            f"this GPU (SM{config.sm_version}){f': {error}' if str(error) else ''}; keep the layer "
            "unquantized or use another scheme"
        ) from error
    for _, _, tuning in intervals:
        _, tile_n, tile_k = tuning["block_shape"]
        if rows % tile_n or columns % tile_k:
            raise QuantConfigError(
                f"{loading.layer_name(layer)}: N = {rows}, K = {columns} is not a multiple of "
                f"Humming's tile ({tile_n}, {tile_k}) on this GPU (SM{config.sm_version}); keep "
                "the layer unquantized or use another scheme"
            )
