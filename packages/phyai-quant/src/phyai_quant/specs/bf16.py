"""Weights that are not quantized."""

from typing import cast

import torch
from torch import nn

from phyai_quant.scheme import QDType, QuantConfigError, QuantScheme
from phyai_quant.specs import base, loading
from phyai_quant.specs.slicing import local_parts

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Bf16Spec:
    """Plain row-major weight ``[N, K]`` in the layer's ``params_dtype`` (fp32, fp16 or bf16).

    Every unquantized weight carries the format name ``bf16``: kernels learn the actual dtype from
    the operands.
    """

    spec_id = "bf16"
    weight_dtype: torch.dtype | None = None
    physical_signature: base.PhysicalSignature = base.PhysicalSignature("bf16")

    def tensor_names(self) -> tuple[str, ...]:
        """Returns ``("weight",)``."""
        return ("weight",)

    def allocate(self, layer: nn.Module, request: base.AllocationRequest) -> None:
        """Registers ``weight`` ``[N, K]``.

        Raises:
            QuantConfigError: ``params_dtype`` is not fp32, fp16 or bf16.
        """
        check_params_dtype(layer, request.params_dtype)
        weight = torch.empty(
            request.weight_shape, dtype=request.params_dtype, device=request.device
        )
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        loading.attach_state(layer, request, self.tensor_names())

    def load_weight(
        self, layer: nn.Module, name: str, loaded: torch.Tensor, shard_id: base.ShardId = None
    ) -> None:
        """Copies a leg ``[w, K]`` into its rows, cast to the parameter's dtype.

        Raises:
            QuantConfigError: Wrong tensor name, leg, shape, or a source that is not fp32, fp16 or
                bf16.
        """
        loading.check_tensor_name(layer, name, self.tensor_names())
        legs = loading.legs_of(layer, shard_id)
        check_float_source(layer, loaded)
        with torch.no_grad():
            for rows, part in local_parts(layer, name, loaded, legs):
                cast("nn.Parameter", layer.weight)[rows].copy_(part)
        loading.load_state(layer).loaded.update((name, leg) for leg in legs)

    def process_after_loading(self, layer: nn.Module) -> None:
        """Marks the layer ready; an unquantized weight needs no other form."""
        loading.load_state(layer).finished = True

    def dequantize_weight(self, layer: nn.Module) -> torch.Tensor:
        """Returns the weight ``[N, K]`` in fp32."""
        return cast("nn.Parameter", layer.weight).detach().float()

    def missing_parts(self, layer: nn.Module) -> list[str]:
        """Returns the legs that were never loaded."""
        return loading.load_state(layer).missing(loading.layer_name(layer))


def check_params_dtype(layer: nn.Module, dtype: torch.dtype) -> None:
    """Raises QuantConfigError when a layer cannot compute in ``dtype``."""
    if dtype not in FLOAT_DTYPES:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: params_dtype {dtype} is not supported; "
            f"allowed: {', '.join(map(str, FLOAT_DTYPES))}"
        )


def check_float_source(layer: nn.Module, loaded: torch.Tensor) -> None:
    """Raises QuantConfigError when a high-precision source was expected but not found."""
    if loaded.dtype not in FLOAT_DTYPES:
        raise QuantConfigError(
            f"{loading.layer_name(layer)}: checkpoint weight is {loaded.dtype}, but an unquantized "
            f"source is needed ({', '.join(map(str, FLOAT_DTYPES))}); if the checkpoint is "
            "quantized, its config must say so for this layer"
        )


def build(scheme: QuantScheme | None, _sm: int | None = None) -> Bf16Spec | None:
    """Returns the spec of an absent scheme or of a bf16 weight, else None."""
    if scheme is None or (scheme.weight.dtype is QDType.BF16 and scheme.input is None):
        return Bf16Spec()
    return None
