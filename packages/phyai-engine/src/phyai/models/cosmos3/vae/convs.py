"""Convolutions over frames [T, H, W, C], channels last in memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from phyai.checkpoints.slots import TensorSlot, stored_slot
from phyai.models.cosmos3.vae.stream import Stream

TAPS = 3
_VECTOR = 8  # channels of one 16-byte access in half precision

Layout = Literal["volume", "stacked"]


@dataclass(frozen=True)
class Build:
    """How the convolutions of a model keep their weights.

    Attributes:
        dtype: of weights and activations.
        device: where the weights live.
        layout: ``volume`` convolves space and time at once; ``stacked`` puts the three frames that
            a kernel sees side by side in the channels and convolves space alone.
        folded: whether the last temporal taps also stand apart, for clips of one frame.
    """

    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    layout: Layout = "volume"
    folded: bool = False

    def zeros(self, *shape: int) -> nn.Parameter:
        """Returns a weight [O, I, ...] with its channels last in memory."""
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        data = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if len(shape) in formats:
            data = data.contiguous(memory_format=formats[len(shape)])
        return nn.Parameter(data, requires_grad=False)


def _aligned(channels: int) -> int:
    return -(-channels // _VECTOR) * _VECTOR


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int, padding: int) -> Tensor:
    """Convolves each frame of ``x`` [T, H, W, C]."""
    out = functional.conv2d(x.permute(0, 3, 1, 2), weight, bias, stride=stride, padding=padding)
    return out.permute(0, 2, 3, 1).contiguous()


def conv_time(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int = 1, padding: int
) -> Tensor:
    """Convolves ``x`` [T, H, W, C] over time without padding, and over space with it.

    Args:
        x: frames.
        weight: [O, C, 3, k, k], or [O, 3 * C, k, k] with the oldest tap first.
        bias: [O] or None.
        stride: over time.
        padding: over space.
    """
    if weight.ndim == 5:
        # A batch axis that is made before the permutation keeps the strides of channels last.
        volume = x.unsqueeze(0).permute(0, 4, 1, 2, 3)
        strides, edges = (stride, 1, 1), (0, padding, padding)
        out = functional.conv3d(volume, weight, bias, stride=strides, padding=edges)
        return out.permute(0, 2, 3, 4, 1)[0].contiguous()
    last = x.shape[0] - TAPS
    taps = [x[tap : tap + last + 1 : stride] for tap in range(TAPS)]
    return conv2d(torch.cat(taps, dim=-1), weight, bias, stride=1, padding=padding)


class TimeWeight(nn.Module):
    """Weight [O, I, 3, k, k] and bias [O] of a convolution over time, in the layout of the build.

    Channels are padded with zeros to whole 16-byte vectors.

    Args:
        inputs: channels before.
        outputs: channels behind.
        kernel: rows and columns of the kernel.
        prefix: stored name.
        build: of the model.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, prefix: str, build: Build
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.outputs = outputs
        self.stored: tuple[int, int, int, int, int] = (outputs, inputs, TAPS, kernel, kernel)
        self.inputs: int = _aligned(inputs)
        rows = _aligned(outputs)
        self.weight: nn.Parameter = (
            build.zeros(rows, self.inputs, TAPS, kernel, kernel)
            if build.layout == "volume"
            else build.zeros(rows, TAPS * self.inputs, kernel, kernel)
        )
        self.bias: nn.Parameter = build.zeros(rows)

    def by_tap(self) -> Tensor:
        """Returns the weight as [O, I, 3, k, k] over the padded channels."""
        if self.weight.ndim == 5:
            return self.weight
        return self.weight.unflatten(1, (TAPS, self.inputs)).transpose(1, 2)

    def _fill(self, source: Tensor) -> None:
        self.by_tap().data[: source.shape[0], : source.shape[1]].copy_(source)

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields weight and bias."""
        yield stored_slot(f"{self.prefix}.weight", self.stored, self._fill)
        yield stored_slot(
            f"{self.prefix}.bias", (self.outputs,), self.bias.data[: self.outputs].copy_
        )


class CausalConv(TimeWeight):
    """3 x 3 x 3 convolution that sees this frame and the two before it.

    The first chunk of a clip has one frame, and zeros before it: only the last temporal tap counts,
    so it is a convolution over space. Later chunks come with room for the two frames before them.

    Args:
        inputs: channels before.
        outputs: channels behind.
        prefix: stored name.
        build: of the model.
        bias_apart: leave the bias to what follows.
    """

    def __init__(
        self, inputs: int, outputs: int, *, prefix: str, build: Build, bias_apart: bool = False
    ) -> None:
        super().__init__(inputs, outputs, 3, prefix=prefix, build=build)
        self.bias_apart = bias_apart
        rows = self.weight.shape[0]
        self.last_tap: nn.Parameter | None = (
            build.zeros(rows, self.inputs, 3, 3) if build.folded else None
        )

    def lead(self, stream: Stream | None) -> int:
        """Returns the number of frames of room that the next chunk needs before its own."""
        return 0 if stream is None or stream.get(self) is None else TAPS - 1

    def forward(self, x: Tensor, stream: Stream | None) -> Tensor:
        """Convolves a chunk.

        Args:
            x: [lead + T, H, W, C]; the room is overwritten. T is 1 in the first chunk.
            stream: of the clip, None if it has one frame alone.

        Returns:
            [T, H, W, O].
        """
        if x.shape[-1] != self.inputs:
            x = functional.pad(x, (0, self.inputs - x.shape[-1]))
        bias = None if self.bias_apart else self.bias
        history = None if stream is None else stream.get(self)
        if history is None:
            if stream is not None:
                stream.put(self, torch.cat((torch.zeros_like(x), x)))
            tap = self.by_tap()[:, :, -1] if self.last_tap is None else self.last_tap
            out = conv2d(x, tap, bias, stride=1, padding=1)
        else:
            x[: TAPS - 1].copy_(history)
            assert stream is not None
            stream.put(self, x[1 - TAPS :])
            out = conv_time(x, self.weight, bias, padding=1)
        return out if out.shape[-1] == self.outputs else out[..., : self.outputs].contiguous()

    def _fill(self, source: Tensor) -> None:
        super()._fill(source)
        if self.last_tap is not None:
            self.last_tap.data.copy_(self.by_tap()[:, :, -1])


def with_room(x: Tensor, lead: int) -> Tensor:
    """Returns ``x`` behind ``lead`` frames that are not written."""
    if lead == 0:
        return x
    out = x.new_empty(lead + x.shape[0], *x.shape[1:])
    out[lead:] = x
    return out


class PointConv(nn.Module):
    """1 x 1 convolution: a linear map of the channels.

    Args:
        inputs: channels before.
        outputs: channels behind.
        prefix: stored name.
        axes: axes of one that are stored behind the weight.
        build: of the model.
    """

    def __init__(
        self, inputs: int, outputs: int, *, prefix: str, axes: int = 3, build: Build
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.stored: tuple[int, ...] = (outputs, inputs) + (1,) * axes
        self.weight: nn.Parameter = build.zeros(outputs, inputs)
        self.bias: nn.Parameter = build.zeros(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., C] to [..., O]."""
        return functional.linear(x, self.weight, self.bias)

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields weight and bias."""

        def fill(source: Tensor) -> None:
            self.weight.data.copy_(source.flatten(1))

        yield stored_slot(f"{self.prefix}.weight", self.stored, fill)
        yield stored_slot(f"{self.prefix}.bias", self.stored[:1], self.bias.data.copy_)
