"""NVFP4 weights in a rotated basis: quantized at load, or read from a checkpoint."""

import torch
from torch import nn

from phyai_quant.scheme import QDType, QuantConfigError, QuantScheme, TensorQuant
from phyai_quant.specs import _rotation, base
from phyai_quant.specs.nvfp4 import Nvfp4Spec, unsupported

STORES = "rotated nvfp4 (none or nvfp4)"


class ConvRotNvfp4Spec(Nvfp4Spec):
    """ConvRot NVFP4: NVFP4 codes of the weight rotated in groups along K.

    The layer holds the tensors of `Nvfp4Spec` in layout ``linear``. An online leg is quantized as
    `ConvRotNVFP4Tensor.from_hp` does, with a global scale of its own; a checkpoint holds what that
    class stores. Inputs, where they are quantized, are rotated first.

    Args:
        weight: Quantization of the weight: nvfp4 with a rotation group.
        activation: Quantization of the input: None or nvfp4.
        online: True when the source is unquantized.

    Raises:
        QuantConfigError: This format does not store the scheme.
    """

    def __init__(
        self, weight: TensorQuant, activation: TensorQuant | None = None, *, online: bool = False
    ) -> None:
        if weight.rotation_group is None:
            raise QuantConfigError(
                f"weight is {weight.describe()}; allowed: nvfp4 with a rotation_group"
            )
        super().__init__(weight, activation, online=online)
        self.rotation_group: int = weight.rotation_group
        self.spec_id: str = f"convrot_nvfp4_g{self.rotation_group}"
        plain = self.physical_signature
        self.physical_signature: base.PhysicalSignature = base.PhysicalSignature(
            format=plain.format,
            layout="convrot",
            block_shape=plain.block_shape,
            scale_dtype=plain.scale_dtype,
            granularity=plain.granularity,
            storage_dtype=plain.storage_dtype,
            fields=(*plain.fields, ("rotation_group", self.rotation_group)),
        )

    def allocate(self, layer: nn.Module, request: base.AllocationRequest) -> None:
        """Registers codes and scales.

        Raises:
            QuantConfigError: The rotation group does not divide K or is cut by a slice.
        """
        super().allocate(layer, request)
        _rotation.check_rotation(layer, self.rotation_group)

    def _quantize(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor

        whole = ConvRotNVFP4Tensor.from_hp(
            source, group_size=self.rotation_group, compute_per_tensor_scale=True
        )
        if whole.per_tensor_scale is None:
            raise ValueError("the quantizer returned no global scale")
        return whole.qdata, whole.scale, whole.per_tensor_scale

    def dequantize_weight(self, layer: nn.Module) -> torch.Tensor:
        """Returns the weight ``[N, K]`` in fp32, rotated back.

        Raises:
            QuantConfigError: `process_after_loading` did not run.
        """
        return _rotation.rotate(super().dequantize_weight(layer), self.rotation_group)

    def quantize_activation(self, x: torch.Tensor, layer: nn.Module) -> base.ActivationView:
        """Rotates an activation ``[..., K]`` and quantizes it; see `_activations.quantize`.

        Returns:
            Codes ``[M, K]`` in the rotated basis.

        Raises:
            QuantConfigError: The format keeps the activation unquantized.
        """
        return super().quantize_activation(_rotation.rotate(x, self.rotation_group), layer)

    def fake_quantize_activation(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        """Returns the activation ``[..., K]`` quantized, read back in fp32 and rotated back."""
        return _rotation.rotate(super().fake_quantize_activation(x, layer), self.rotation_group)


def build(scheme: QuantScheme | None, _sm: int | None = None) -> ConvRotNvfp4Spec | None:
    """Returns the spec of a scheme with a rotated nvfp4 weight, else None."""
    if scheme is None or scheme.weight.rotation_group is None:
        return None
    act = scheme.input
    if unsupported(scheme.weight, act) or (act is not None and act.dtype is not QDType.NVFP4):
        return None
    return ConvRotNvfp4Spec(scheme.weight, act, online=scheme.online)
