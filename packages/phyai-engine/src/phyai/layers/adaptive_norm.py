"""RMS norm modulated by a condition."""

import torch
from torch import Tensor, nn

from phyai.dispatch import CallSite
from phyai.layers.linear import Linear


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
        self.eps = eps
        self.width = width
        self.dense: Linear = Linear(
            cond_dim,
            3 * width,
            bias=True,
            prefix=f"{prefix}.dense",
            role="modulation",
            params_dtype=torch.float32,
            device=device,
        )
        self._site, self._add_site = (
            CallSite(op, role="adarmsnorm", dims={"hidden": width, "cond_dim": cond_dim})
            for op in ("adarmsnorm", "adarmsnorm_add")
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

    def add(
        self, x: Tensor, residual: Tensor, gate: Tensor, modulation: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Adds ``gate * x`` [T, width] to the residual and normalises the sum.

        Args:
            x: a sublayer's output.
            residual: [T, width].
            gate: [1 or T, width] of the norm before that sublayer.
            modulation: [1 or T, 3 * width] of this norm.

        Returns:
            The output [T, width], the sum [T, width] and this norm's gate [1 or T, width].
        """
        selection = self._add_site.select(
            device=x.device,
            dtype={
                "input": x.dtype,
                "residual": residual.dtype,
                "gate": gate.dtype,
                "modulation": modulation.dtype,
            },
            dims={"tokens": x.numel() // self.width},
        )
        return selection.execute(x, residual, gate, modulation, self.eps)
