"""What stands between the convolutions: the channel norm, SiLU and sums of maps [..., C]."""

import importlib.util
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from phyai.checkpoints.slots import TensorSlot, stored_slot


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def fused(x: Tensor) -> bool:
    """Whether kernels of this project run on what ``x`` is on."""
    return x.is_cuda and _has_triton()


def channel_norm(
    x: Tensor, gain: Tensor, bias: Tensor | None, *, silu: bool, out: Tensor
) -> Tensor:
    """Writes ``v / max(|v|, 1e-12) * gain`` with ``v = x + bias`` to ``out``, reduced in fp32.

    Args:
        x: [..., C], contiguous; |v| is the length over C.
        gain: [C] in fp32.
        bias: [C] or None.
        silu: whether SiLU follows, in fp32.
        out: like ``x``, contiguous.

    Returns:
        ``out``.
    """
    if fused(x):
        from phyai.triton import channel_rows

        return channel_rows.channel_norm(x, gain, bias, silu=silu, out=out)
    values = x.float() if bias is None else x.float() + bias.float()
    result = functional.normalize(values, dim=-1) * gain
    return out.copy_(functional.silu(result) if silu else result)


def add_bias_residual(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """Adds ``bias`` [C] and ``residual`` to ``x`` [..., C] in fp32, overwriting ``x``.

    All are contiguous.
    """
    if fused(x):
        from phyai.triton import channel_rows

        return channel_rows.add_bias_residual(x, bias, residual)
    return x.copy_(x.float() + bias.float() + residual.float())


class ChannelNorm(nn.Module):
    """Length of one over the channels, times ``sqrt(C)`` and a learned gain, perhaps with SiLU.

    Args:
        width: channels.
        prefix: stored name of the norm.
        silu: whether SiLU follows.
        axes: axes of one that are stored behind the channels.
        device: where the gain lives.
    """

    def __init__(
        self,
        width: int,
        *,
        prefix: str,
        silu: bool = True,
        axes: int = 3,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.silu = silu
        self.stored: tuple[int, ...] = (width,) + (1,) * axes
        self.gain: nn.Parameter = nn.Parameter(
            torch.empty(width, device=device), requires_grad=False
        )

    def forward(self, x: Tensor, bias: Tensor | None = None, *, lead: int = 0) -> Tensor:
        """Normalises ``x + bias``, x [T, H, W, C] contiguous.

        Args:
            x: a map.
            bias: of the convolution that made ``x``, or None.
            lead: frames to leave room for.

        Returns:
            [lead + T, H, W, C]; the first ``lead`` frames are not written.
        """
        out = x.new_empty(lead + x.shape[0], *x.shape[1:])
        channel_norm(x, self.gain, bias, silu=self.silu, out=out[lead:])
        return out

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields ``gamma``; the gain holds it times the root of the width."""

        def fill(gamma: Tensor) -> None:
            self.gain.data.copy_(gamma.flatten().float() * len(self.gain) ** 0.5)

        yield stored_slot(f"{self.prefix}.gamma", self.stored, fill)
