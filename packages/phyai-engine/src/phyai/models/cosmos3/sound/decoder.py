"""The sound decoder: latents at 25 Hz to stereo samples at 48 kHz.

An Oobleck decoder (Stable Audio, arXiv 2404.10301): transposed convolutions between residual units
of dilated convolutions, with Snake activations (arXiv 2006.08195) whose frequency and amplitude are
learned apart, all non-causal. Weight norm is folded when loaded.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from phyai.checkpoints.slots import TensorSlot, stored_slot
from phyai.models.cosmos3.sound.config import SoundConfig

_DILATIONS = (1, 3, 9)
_KERNEL = 7


class NormedWeight(nn.Module):
    """Weight [rows, columns, kernel] of a convolution, stored as direction and length of its rows.

    Args:
        rows: first axis, whose rows have the lengths.
        columns: second axis.
        kernel: taps.
        bias: size of the bias, 0 for none.
        prefix: stored name.
        dtype: of the weights.
        device: where they live.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        kernel: int,
        *,
        bias: int,
        prefix: str,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.prefix = prefix

        def empty(*shape: int) -> nn.Parameter:
            data = torch.empty(shape, dtype=dtype, device=device)
            return nn.Parameter(data, requires_grad=False)

        self.weight: nn.Parameter = empty(rows, columns, kernel)
        self.bias: nn.Parameter | None = empty(bias) if bias else None
        self._loaded: dict[str, Tensor] = {}

    def _fill(self, part: str, source: Tensor) -> None:
        self._loaded[part] = source.float()
        if len(self._loaded) == 2:
            length, direction = self._loaded.pop("weight_g"), self._loaded.pop("weight_v")
            norms = direction.flatten(1).norm(dim=1).view(-1, 1, 1)
            self.weight.data.copy_(length * direction / norms)

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields lengths, directions and bias."""
        rows = self.weight.shape[0]
        for part, shape in (("weight_g", (rows, 1, 1)), ("weight_v", tuple(self.weight.shape))):
            yield stored_slot(
                f"{self.prefix}.{part}", shape, lambda source, part=part: self._fill(part, source)
            )
        if self.bias is not None:
            yield stored_slot(f"{self.prefix}.bias", tuple(self.bias.shape), self.bias.data.copy_)


class Conv(NormedWeight):
    """Convolution over time that keeps the length.

    Args:
        inputs: channels before.
        outputs: channels behind.
        kernel: taps, an odd number.
        dilation: steps between them.
        bias: whether there is one.
        prefix: stored name.
        **options: dtype and device.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        dilation: int = 1,
        bias: bool = True,
        prefix: str,
        **options: Any,
    ) -> None:
        super().__init__(outputs, inputs, kernel, bias=outputs * bias, prefix=prefix, **options)
        self.dilation = dilation
        self.padding: int = dilation * (kernel - 1) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Maps [inputs, T] to [outputs, T]."""
        return functional.conv1d(
            x, self.weight, self.bias, padding=self.padding, dilation=self.dilation
        )


class Upsample(NormedWeight):
    """Transposed convolution that multiplies the length by its stride; the kernel is twice as long.

    Args:
        inputs: channels before.
        outputs: channels behind.
        stride: steps made of one.
        prefix: stored name.
        **options: dtype and device.
    """

    def __init__(
        self, inputs: int, outputs: int, stride: int, *, prefix: str, **options: Any
    ) -> None:
        super().__init__(inputs, outputs, 2 * stride, bias=outputs, prefix=prefix, **options)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Maps [inputs, T] to [outputs, stride * T]."""
        return functional.conv_transpose1d(
            x,
            self.weight,
            self.bias,
            stride=self.stride,
            padding=(self.stride + 1) // 2,
            output_padding=self.stride % 2,
        )


class Snake(nn.Module):
    """``x + sin(a x)^2 / (b + 1e-9)`` for each channel, in fp32; a and b are stored as logarithms.

    Args:
        width: channels.
        prefix: stored name.
        device: where the parameters live.
    """

    frequency: nn.Parameter
    amplitude: nn.Parameter

    def __init__(self, width: int, *, prefix: str, device: torch.device | str) -> None:
        super().__init__()
        self.prefix = prefix
        self.stored: tuple[int, int, int] = (1, width, 1)
        self.frequency, self.amplitude = (
            nn.Parameter(torch.empty(width, 1, device=device), requires_grad=False)
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [width, T] to the same shape."""
        wave = (x * self.frequency).sin_().square_()
        return torch.addcmul(x.float(), wave, self.amplitude).to(x.dtype)

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields both logarithms."""

        def fill_frequency(source: Tensor) -> None:
            self.frequency.data.copy_(source[0].float().exp())

        def fill_amplitude(source: Tensor) -> None:
            self.amplitude.data.copy_(1 / (source[0].float().exp() + 1e-9))

        yield stored_slot(f"{self.prefix}.alpha", self.stored, fill_frequency)
        yield stored_slot(f"{self.prefix}.beta", self.stored, fill_amplitude)


class SoundBlock(nn.Module):
    """Snake and a transposed convolution, then residual units of growing dilation.

    Args:
        inputs: channels before.
        outputs: channels behind.
        stride: steps made of one.
        prefix: stored name.
        dtype: of the weights.
        device: where they live.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        *,
        prefix: str,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.snake: Snake = Snake(inputs, prefix=f"{prefix}.snake1", device=device)
        self.upsample: Upsample = Upsample(
            inputs, outputs, stride, prefix=f"{prefix}.conv_t1", **options
        )
        self.units: nn.ModuleList = nn.ModuleList()
        for index, dilation in enumerate(_DILATIONS, start=1):
            unit = f"{prefix}.res_unit{index}"
            wide = Conv(
                outputs, outputs, _KERNEL, dilation=dilation, prefix=f"{unit}.conv1", **options
            )
            self.units.append(
                nn.Sequential(
                    Snake(outputs, prefix=f"{unit}.snake1", device=device),
                    wide,
                    Snake(outputs, prefix=f"{unit}.snake2", device=device),
                    Conv(outputs, outputs, 1, prefix=f"{unit}.conv2", **options),
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [inputs, T] to [outputs, stride * T]."""
        x = self.upsample(self.snake(x))
        for unit in self.units:
            x = unit(x).add_(x)
        return x


class SoundDecoder(nn.Module):
    """Sound latents to samples.

    Args:
        config: sizes.
        dtype: of weights and activations.
        device: where the weights live.
    """

    def __init__(
        self,
        config: SoundConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        blocks = config.blocks
        first, last = blocks[0][0], blocks[-1][1]
        self.conv_in: Conv = Conv(
            config.vocoder_input_dim, first, _KERNEL, prefix="decoder.conv1", **options
        )
        self.blocks: nn.ModuleList = nn.ModuleList(
            SoundBlock(*sizes, prefix=f"decoder.block.{index}", **options)
            for index, sizes in enumerate(blocks)
        )
        self.snake: Snake = Snake(last, prefix="decoder.snake1", device=device)
        self.conv_out: Conv = Conv(
            last, config.dec_out_channels, _KERNEL, bias=False, prefix="decoder.conv2", **options
        )

    @classmethod
    def from_config(cls, values: Mapping[str, Any], **options: Any) -> "SoundDecoder":
        """Builds a decoder without weights from ``sound_tokenizer/config.json``."""
        return cls(SoundConfig.from_dict(values), **options)

    def sound_frames(self, num_frames: int, fps: float) -> int:
        """Returns the latent frames of the sound of a clip; see `SoundConfig.frames`."""
        return self.config.frames(num_frames, fps)

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes the sound of a clip.

        Args:
            latents: [vocoder_input_dim, frames].

        Returns:
            Samples [2, hop * frames] in [-1, 1] at ``config.sampling_rate``, in fp32.

        Raises:
            ValueError: if the shape does not fit.
        """
        width = self.config.vocoder_input_dim
        if latents.ndim != 2 or latents.shape[0] != width or latents.shape[1] == 0:
            raise ValueError(f"sound latents must be [{width}, frames], got {list(latents.shape)}")
        x = self.conv_in(latents.to(self.conv_in.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return self.conv_out(self.snake(x)).float().clamp_(-1.0, 1.0)
