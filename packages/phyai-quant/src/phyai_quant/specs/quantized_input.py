"""What weight formats share that may quantize the activation of their layer."""

from typing import Any

import torch
from torch import nn

from phyai_quant.scheme import QuantConfigError, TensorQuant
from phyai_quant.specs import _activations, base, loading


class QuantizedInput:
    """The part of a `base.WeightSpec` about its input, and about what has not arrived.

    Attributes:
        spec_id: Id of the format, for messages.
        activation: Quantization of the input; None keeps the activation unquantized.
    """

    spec_id: str
    activation: TensorQuant | None

    @property
    def needs_act_quant(self) -> bool:
        """True when kernels read a quantized activation."""
        return self.activation is not None

    @property
    def static_input(self) -> bool:
        """True when the activation's scale comes from the checkpoint."""
        return self.activation is not None and not self.activation.dynamic

    @property
    def static_names(self) -> tuple[str, ...]:
        """Names of the tensors of a static input: its scale, or nothing."""
        return ("input_scale",) if self.static_input else ()

    def missing_parts(self, layer: nn.Module) -> list[str]:
        """Returns the legs and scales that were never loaded."""
        return loading.load_state(layer).missing(loading.layer_name(layer))

    def quantize_activation(self, x: torch.Tensor, layer: nn.Module) -> base.ActivationView:
        """Quantizes an activation; `_activations.quantize` gives the formulas of float formats.

        Args:
            x: Activation ``[..., K]`` in fp32, fp16 or bf16.
            layer: The layer, which holds a static ``input_scale``.

        Raises:
            QuantConfigError: The format keeps the activation unquantized.
        """
        if self.activation is None:
            raise QuantConfigError(
                f"{loading.layer_name(layer)}: {self.spec_id} is weight-only and does not quantize "
                "its input"
            )
        return self._quantize_activation(x, layer, self.activation)

    def fake_quantize_activation(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        """Returns the activation ``[..., K]`` quantized and read back in fp32.

        Raises:
            QuantConfigError: The format keeps the activation unquantized.
        """
        view = self.quantize_activation(x, layer)
        block = None if self.activation is None else self.activation.block_shape
        return dequantize_activation(view, 1 if block is None else block[1]).reshape(x.shape)

    def _quantize_activation(
        self, x: torch.Tensor, layer: nn.Module, activation: TensorQuant
    ) -> base.ActivationView:
        scale: Any = getattr(layer, "input_scale", None)
        return _activations.quantize(x, activation, None if scale is None else scale.detach())


def dequantize_activation(view: base.ActivationView, group: int = 1) -> torch.Tensor:
    """Returns the activation ``[M, K]`` in fp32: codes, less their zero point, times their scale.

    Args:
        view: The quantized activation.
        group: Elements along K that share a scale, for scales ``[M, ceil(K / group)]``.
    """

    def per_element(entries: torch.Tensor) -> torch.Tensor:
        if entries.ndim < 2:
            return entries.float().reshape(-1, 1)
        return entries.float().repeat_interleave(group, 1)[:, : view.x.shape[1]]

    values = view.x.float()
    if view.x_zero_point is not None:
        values = values - per_element(view.x_zero_point)
    return values * per_element(view.x_scale)
