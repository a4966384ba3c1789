"""Convolutions of a video encoder, and what runs them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from piper_kernels.conv3d.convrot.int8 import conv3d, group_norm_silu_conv3d
from piper_kernels.conv3d.convrot.int8._geometry import Geometry, Padding, padding_flags
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

NORM_GROUPS = 32
EPSILON = 1e-6
SCALE = 4.2 / 127  # of standard normal activations
PADS = {
    "none": (0, 0, 0, 0, 0, 0),
    "reflect": (1, 1, 1, 1, 0, 0),
    "reflect_right": (0, 1, 0, 1, 0, 0),
}
LABELS = {
    "fp16": "cuDNN float16, contiguous",
    "fp16_last": "cuDNN float16, channels last",
    "piper": "ConvRot INT8, contiguous",
    "piper_last": "ConvRot INT8, channels last",
    "fp16_block": "cuDNN float16 with padding, norm and SiLU",
    "piper_block": "ConvRot INT8 with padding, norm and SiLU",
}
BASELINES = ("fp16", "fp16_last")


@dataclass(frozen=True)
class ConvolutionCase:
    """A causal 3x3x3 convolution of one sample.

    Attributes:
        channels: ``C``.
        outputs: ``O``.
        frames: ``T``.
        height: ``H``.
        width: ``W``.
        stride: Steps along time, height and width.
        padding: Spatial padding.
    """

    channels: int
    outputs: int
    frames: int
    height: int
    width: int
    stride: tuple[int, int, int] = (1, 1, 1)
    padding: Padding = "reflect"

    @property
    def name(self) -> str:
        """Sizes and stride in one line."""
        step = "" if self.stride == (1, 1, 1) else f" stride {'x'.join(map(str, self.stride))}"
        size = f"{self.frames}x{self.height}x{self.width}"
        return f"{self.channels} to {self.outputs} channels, {size}{step}"

    @cached_property
    def geometry(self) -> Geometry:
        """The sizes of input and output."""
        symmetric, right = padding_flags(self.padding)
        return Geometry(
            1, self.channels, self.frames, self.height, self.width, self.outputs, self.stride,
            int(symmetric), int(symmetric or right),
        )  # fmt: skip

    @property
    def operations(self) -> int:
        """Multiplications and additions, those with padding included."""
        return 2 * 27 * self.channels * self.outputs * self.geometry.voxels


FULL = (
    ConvolutionCase(128, 128, 5, 512, 512),
    ConvolutionCase(128, 128, 5, 512, 512, (1, 2, 2), "reflect_right"),
    ConvolutionCase(256, 256, 5, 256, 256),
    ConvolutionCase(256, 512, 5, 128, 128),
    ConvolutionCase(512, 512, 5, 128, 128, (2, 2, 2), "reflect_right"),
    ConvolutionCase(1024, 1024, 3, 64, 64),
)
QUICK = (
    ConvolutionCase(64, 64, 2, 9, 11),
    ConvolutionCase(64, 32, 3, 8, 8, (2, 2, 2), "reflect_right"),
)


@dataclass(frozen=True)
class Operands:
    """Inputs and weights of a case.

    Attributes:
        inputs: float16 ``[1, C, T, H, W]``, several of them.
        dense: float16 ``[O, C, 3, 3, 3]``.
        bias: float16 ``[O]``.
        norm: FP32 weight and bias ``[C]`` of the normalization.
        packed: The quantized filter.
    """

    inputs: list[Tensor]
    dense: Tensor
    bias: Tensor
    norm: tuple[Tensor, Tensor]
    packed: ConvRotInt8Tensor


def make_operands(case: ConvolutionCase, device: torch.device, sets: int) -> Operands:
    """Return random operands: standard normal inputs, outputs of magnitude one."""
    generator = torch.Generator(device).manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float16)

    shape = (1, case.channels, case.frames, case.height, case.width)
    dense = normal(case.outputs, case.channels, 3, 3, 3) * (27 * case.channels) ** -0.5
    packed = ConvRotInt8Tensor.from_hp(
        dense,
        group_size=64 if case.channels <= 128 else 256,
        act_per_tensor_scale=torch.tensor(SCALE, device=device),
    )
    norm = (torch.ones(case.channels, device=device), torch.zeros(case.channels, device=device))
    inputs = [normal(*shape) for _ in range(sets)]
    return Operands(inputs, dense, normal(case.outputs), norm, packed)


def pad(case: ConvolutionCase, x: Tensor) -> Tensor:
    """Return an input with its reflected pixels and the zero frames in front."""
    if case.padding != "none":
        x = functional.pad(x, PADS[case.padding], mode="reflect")
    return functional.pad(x, (0, 0, 0, 0, 2, 0))


def normalize(x: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
    """Return SiLU of the group normalization of single frames."""
    batch, channels, frames, height, width = x.shape
    x = x.permute(0, 2, 1, 3, 4).reshape(batch * frames, channels, height, width)
    weight, bias = (parameter.to(x.dtype) for parameter in norm)
    x = functional.silu(functional.group_norm(x, NORM_GROUPS, weight, bias, EPSILON))
    return x.view(batch, frames, channels, height, width).permute(0, 2, 1, 3, 4)


def providers(case: ConvolutionCase, operands: Operands) -> dict[str, Callable[[int], Tensor]]:
    """Return what runs a case on an input by its index.

    Inputs of the float16 convolutions are padded before: their padding is not timed, except in
    ``fp16_block``.
    """
    o, packed = operands, operands.packed
    last = torch.channels_last_3d
    channels_last = [x.to(memory_format=last) for x in o.inputs]
    padded = [pad(case, x) for x in o.inputs]
    padded_last = [x.to(memory_format=last) for x in padded]
    dense_last = o.dense.to(memory_format=last)

    def fp16(x: Tensor, weight: Tensor) -> Tensor:
        return functional.conv3d(x, weight, o.bias, case.stride)

    def piper(x: Tensor) -> Tensor:
        return conv3d(x, packed, o.bias, stride=case.stride, padding=case.padding)

    def piper_block(x: Tensor) -> Tensor:
        return group_norm_silu_conv3d(
            x, *o.norm, NORM_GROUPS, EPSILON, packed, o.bias, stride=case.stride,
            padding=case.padding,
        )  # fmt: skip

    return {
        "fp16": lambda index: fp16(padded[index], o.dense),
        "fp16_last": lambda index: fp16(padded_last[index], dense_last),
        "piper": lambda index: piper(o.inputs[index]),
        "piper_last": lambda index: piper(channels_last[index]),
        "fp16_block": lambda index: fp16(pad(case, normalize(o.inputs[index], o.norm)),
                                         o.dense),
        "piper_block": lambda index: piper_block(o.inputs[index]),
    }  # fmt: skip
