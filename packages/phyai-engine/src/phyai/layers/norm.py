"""RMS, layer and adaptive normalisation."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from phyai.checkpoints.slots import TensorSlot, copy_slot
from phyai.dispatch import CallSite
from phyai.layers.linear import Linear


def _parameter(width: int, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(width, dtype=torch.float32, device=device), requires_grad=False)


class RMSNorm(nn.Module):
    """``x / rms(x) * (1 + w)``: Gemma's RMS norm, reduced in fp32, weights kept in fp32."""

    def __init__(
        self, width: int, *, prefix: str, eps: float = 1e-6, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.prefix, self.eps, self.width = prefix, eps, width
        self.weight = _parameter(width, device)
        self._site = CallSite(
            "rmsnorm", role="norm", dims={"hidden": width}, attrs={"variant": "gemma"}
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``x`` [..., width] over its last axis."""
        selection = self._site.select(
            device=x.device,
            dtype={"input": x.dtype, "weight": self.weight.dtype},
            dims={"tokens": x.numel() // self.width},
        )
        return selection.execute(x, self.weight, self.eps)

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields the weight."""
        yield copy_slot(f"{self.prefix}.weight", self.weight)


class LayerNorm(nn.Module):
    """Layer norm with weight and bias, reduced in fp32, parameters kept in fp32."""

    def __init__(
        self, width: int, *, prefix: str, eps: float = 1e-6, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.prefix, self.eps, self.width = prefix, eps, width
        self.weight = _parameter(width, device)
        self.bias = _parameter(width, device)
        self._site = CallSite(
            "layernorm", role="layernorm", dims={"hidden": width}, attrs={"bias": True}
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``x`` [..., width] over its last axis."""
        selection = self._site.select(
            device=x.device,
            dtype={"input": x.dtype, "weight": self.weight.dtype, "bias": self.bias.dtype},
            dims={"tokens": x.numel() // self.width},
        )
        return selection.execute(x, self.weight, self.bias, self.eps)

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields weight and bias."""
        yield copy_slot(f"{self.prefix}.weight", self.weight)
        yield copy_slot(f"{self.prefix}.bias", self.bias)


class AdaRMSNorm(nn.Module):
    """RMS norm whose scale, shift and residual gate come from a condition.

    ``dense`` maps the condition to ``(scale, shift, gate)``; the output is
    ``x / rms(x) * (1 + scale) + shift``, and the gate multiplies the sublayer's output at the
    residual. The modulation is computed and kept in fp32.
    """

    def __init__(
        self,
        width: int,
        cond_dim: int,
        *,
        prefix: str,
        eps: float = 1e-6,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.eps, self.width = eps, width
        self.dense = Linear(
            cond_dim,
            3 * width,
            bias=True,
            prefix=f"{prefix}.dense",
            role="modulation",
            params_dtype=torch.float32,
            device=device,
        )
        self._site = CallSite(
            "adarmsnorm", role="adarmsnorm", dims={"hidden": width, "cond_dim": cond_dim}
        )

    def modulation(self, cond: Tensor) -> Tensor:
        """Maps the condition [..., cond_dim] to ``(scale, shift, gate)`` [..., 3 * width]."""
        return self.dense(cond)

    def forward(self, x: Tensor, modulation: Tensor) -> tuple[Tensor, Tensor]:
        """Normalises ``x`` [T, width] with ``modulation`` [1 or T, 3 * width].

        Returns:
            The output [T, width] and the gate [1 or T, width].
        """
        selection = self._site.select(
            device=x.device,
            dtype={"input": x.dtype, "modulation": modulation.dtype},
            dims={"tokens": x.numel() // self.width},
        )
        return selection.execute(x, modulation, self.eps)
