"""Feed-forward blocks."""

import torch
from torch import Tensor, nn

from phyai.dispatch import CallSite
from phyai.kernels.fp8_rows import Fp8Rows, Int8Rows, RoundedRows
from phyai.layers.linear import Leg, Linear


class Activation(nn.Module):
    """A pointwise activation, or the product of an activated half with the other half."""

    def __init__(self, name: str, *, gated: bool, width: int) -> None:
        super().__init__()
        self.width: int = 2 * width if gated else width
        self.name = name
        self.gated = gated
        self._site = CallSite(
            "activation",
            role="mlp.activation",
            dims={"hidden": width},
            attrs={"activation": name, "gated": gated},
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., width] (twice that when gated: ``[activated | multiplied]``) to width."""
        selection = self._site.select(
            device=x.device, dtype={"input": x.dtype}, dims={"tokens": x.numel() // self.width}
        )
        return selection.execute(x)

    def fp8_rows(self, x: Tensor) -> Fp8Rows:
        """Does what `forward` does and rounds to FP8 at once, for a product that takes such rows.

        Triton must run on the device of ``x``.
        """
        from phyai.triton.fp8_rows import activation_rows

        return Fp8Rows(*activation_rows(x, self.name, gated=self.gated), x.dtype)

    def int8_rows(self, x: Tensor, group: int) -> Int8Rows:
        """Does what `fp8_rows` does for a product that takes INT8 rows rotated by ``group``.

        Of a gated SiLU, whose values are fp32 until they are codes.
        """
        from piper_kernels.linear.convrot.int8.rows import gated_rows

        return Int8Rows(*gated_rows(x, group), x.dtype)


def fed_forward(
    up: Linear, activation: Activation, down: Linear, x: Tensor | RoundedRows
) -> Tensor:
    """Returns ``down(activation(up(x)))`` [T, width] for ``x`` [T, width].

    One kernel may do the first product and the activation, or the activation and the rounding for
    a product that takes rounded rows.
    """
    place = x.shape[0], x.dtype, x.device
    if down.takes_fp8_rows(*place):
        return down(activation.fp8_rows(up(x)))
    rotates = activation.gated and activation.name == "silu"
    group = down.takes_int8_rows(*place) if rotates else None
    if group is not None:
        return down(activation.int8_rows(up(x), group))
    if isinstance(x, RoundedRows):
        return down(activation(up(x)))
    return down(up.activated(x, activation))


class GatedMLP(nn.Module):
    """``down(gelu_tanh(gate(x)) * up(x))`` with gate and up fused in one projection."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        prefix: str,
        role: str,
        params_dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.gate_up_proj: Linear = Linear(
            width,
            (Leg("gate_proj", hidden, 0), Leg("up_proj", hidden, 1)),
            prefix=f"{prefix}.gate_up_proj",
            role=role,
            params_dtype=params_dtype,
            device=device,
        )
        self.activation: Activation = Activation("gelu_tanh", gated=True, width=hidden)
        self.down_proj: Linear = Linear(
            hidden,
            width,
            prefix=f"{prefix}.down_proj",
            role=role,
            params_dtype=params_dtype,
            device=device,
        )

    def forward(self, x: Tensor | RoundedRows) -> Tensor:
        """Maps [T, width] to [T, width]."""
        return fed_forward(self.gate_up_proj, self.activation, self.down_proj, x)


class PlainMLP(nn.Module):
    """``fc2(gelu_tanh(fc1(x)))`` with biases."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        prefix: str,
        role: str,
        params_dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.fc1: Linear = Linear(
            width,
            hidden,
            bias=True,
            prefix=f"{prefix}.fc1",
            role=role,
            params_dtype=params_dtype,
            device=device,
        )
        self.activation: Activation = Activation("gelu_tanh", gated=False, width=hidden)
        self.fc2: Linear = Linear(
            hidden,
            width,
            bias=True,
            prefix=f"{prefix}.fc2",
            role=role,
            params_dtype=params_dtype,
            device=device,
        )

    def forward(self, x: Tensor | RoundedRows) -> Tensor:
        """Maps [T, width] to [T, width]."""
        return fed_forward(self.fc1, self.activation, self.fc2, x)
