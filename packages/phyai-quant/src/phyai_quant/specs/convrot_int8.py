"""INT8 weights in a rotated basis, quantized while they are loaded."""

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from phyai_quant.scheme import ROTATION_GROUPS, QuantConfigError, QuantScheme
from phyai_quant.specs import base
from phyai_quant.specs.bf16 import check_float_source, check_params_dtype
from phyai_quant.specs.slicing import local_parts

if TYPE_CHECKING:
    from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor


class ConvRotInt8Spec:
    """ConvRot INT8: codes int8 ``[N, K]`` of the rotated weight and one fp32 scale per row.

    ``layer.weight`` is a parameter that wraps a `ConvRotInt8Tensor` whose logical dtype is the
    layer's ``params_dtype``. Rows are quantized independently, so every leg is quantized as it
    arrives, in fp32 from the dtype of its source, and no high-precision copy of the layer is kept.

    Args:
        rotation_group: Length of the rotation along K: 16, 64 or 256.
    """

    weight_dtype: torch.dtype | None = torch.int8

    def __init__(self, rotation_group: int) -> None:
        self.rotation_group = rotation_group
        self.spec_id = f"convrot_int8_g{rotation_group}"
        self.physical_signature = base.PhysicalSignature(
            format="int8",
            layout="convrot",
            granularity="per_channel",
            scale_dtype="fp32",
            storage_dtype="int8",
            fields=(("activation", "int8"), ("rotation_group", rotation_group)),
        )

    def tensor_names(self) -> tuple[str, ...]:
        """Returns ``("weight",)``: the high-precision source."""
        return ("weight",)

    def allocate(self, layer: nn.Module, request: base.AllocationRequest) -> None:
        """Registers the quantized ``weight`` ``[N, K]``; its scales are NaN until loaded.

        Raises:
            QuantConfigError: K is no multiple of the rotation group, or ``params_dtype`` is not
                fp32, fp16 or bf16.
        """
        from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

        check_params_dtype(layer, request.params_dtype)
        rows, columns = request.weight_shape
        if columns % self.rotation_group:
            raise QuantConfigError(
                f"{base.layer_name(layer)}: K = {columns} is not divisible by rotation_group "
                f"{self.rotation_group}; allowed groups: {', '.join(map(str, ROTATION_GROUPS))}; "
                "choose one that divides K or keep the layer unquantized"
            )
        weight = ConvRotInt8Tensor.from_quantized(
            torch.zeros(rows, columns, dtype=torch.int8, device=request.device),
            torch.full((rows, 1), torch.nan, dtype=torch.float32, device=request.device),
            group_size=self.rotation_group,
            logical_dtype=request.params_dtype,
        )
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        base.attach_state(layer, request, self.tensor_names())

    def load_weight(
        self, layer: nn.Module, name: str, loaded: torch.Tensor, shard_id: base.ShardId = None
    ) -> None:
        """Quantizes a leg ``[w, K]`` (fp32, fp16 or bf16) into its rows, on the layer's device.

        Raises:
            QuantConfigError: Wrong tensor name, leg, shape or source dtype.
        """
        from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

        base.check_tensor_name(layer, name, self.tensor_names())
        legs = base.legs_of(layer, shard_id)
        check_float_source(layer, loaded)
        weight = _quantized(layer)
        with torch.no_grad():
            # Whole rows are quantized before they are cut, so ranks share the scale of a row.
            source = loaded.to(weight.qdata.device)
            whole = ConvRotInt8Tensor.from_hp(source, group_size=self.rotation_group)
            for rows, part in local_parts(layer, name, whole.qdata, legs):
                weight.qdata[rows].copy_(part)
            for rows, part in local_parts(layer, name, whole.scale, legs, columns_per_entry=None):
                weight.scale[rows, 0].copy_(part)
        base.load_state(layer).loaded.update((name, leg_index) for leg_index in legs)

    def process_after_loading(self, layer: nn.Module) -> None:
        """Checks that every leg has arrived.

        Raises:
            QuantConfigError: A leg was never loaded.
        """
        base.check_complete(layer)
        base.load_state(layer).finished = True

    def dequantize_weight(self, layer: nn.Module) -> torch.Tensor:
        """Returns the weight ``[N, K]`` in fp32, rotated back."""
        return _quantized(layer).dequantize(torch.float32)

    def missing_parts(self, layer: nn.Module) -> list[str]:
        """Returns the legs that were never loaded."""
        return base.load_state(layer).missing(base.layer_name(layer))


def _quantized(layer: nn.Module) -> "ConvRotInt8Tensor":
    return cast("ConvRotInt8Tensor", layer.weight)


def build(scheme: QuantScheme | None, _sm: int | None = None) -> ConvRotInt8Spec | None:
    """Returns the spec of a scheme with a rotated weight that is quantized at load, else None."""
    if scheme is None or scheme.weight.rotation_group is None or not scheme.online:
        return None
    return ConvRotInt8Spec(scheme.weight.rotation_group)
