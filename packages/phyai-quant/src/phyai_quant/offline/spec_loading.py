"""Loads one layer of a checkpoint through its weight spec."""

import torch
from torch import nn

from phyai_quant.materialize import materialize
from phyai_quant.offline.files import DTYPES
from phyai_quant.offline.layers import QUANT_TENSORS, Layer, logical_shape
from phyai_quant.scheme import QuantConfigError, QuantScheme
from phyai_quant.specs.base import AllocationRequest, WeightSpec

_COMPUTE = (torch.float32, torch.bfloat16, torch.float16)


def load_layer(layer: Layer, scheme: QuantScheme | None) -> tuple[WeightSpec, nn.Module]:
    """Loads a layer on the CPU through the portable spec of its scheme.

    Raises:
        QuantConfigError: No spec stores the scheme, a tensor is missing, unexpected, or does not
            have the shape or dtype that the scheme asks for.
    """
    spec = materialize(scheme)
    rows, columns = logical_shape(layer, scheme)
    stored = DTYPES.get(layer.weight.dtype)
    module = nn.Module()
    module.prefix = layer.name  # pyright: ignore[reportArgumentType]
    dtype = stored if stored in _COMPUTE else torch.float32
    spec.allocate(module, AllocationRequest((rows, columns), dtype))
    accepted = spec.tensor_names()
    unexpected = [t for t in layer.tensors if t in QUANT_TENSORS[:-1] and t not in accepted]
    unexpected = [t for t in unexpected if t != "weight_shape"]
    if unexpected:
        names = ", ".join(layer.full_name(tensor) for tensor in unexpected)
        raise QuantConfigError(
            f"{layer.name}: the checkpoint holds {names}, which {spec.spec_id} does not read "
            f"(it reads {', '.join(accepted)}); correct the quantization config"
        )
    for tensor, entry in layer.tensors.items():
        if tensor in accepted:
            spec.load_weight(module, tensor, entry.read())
    spec.process_after_loading(module)
    return spec, module


def dequantize_layer(layer: Layer, scheme: QuantScheme | None) -> torch.Tensor:
    """Returns the weight ``[N, K]`` of a layer in fp32; errors as `load_layer`."""
    spec, module = load_layer(layer, scheme)
    return spec.dequantize_weight(module)
