"""A video encoder with the structure of the MiniMax-H3 VAE, as small as its names allow."""

import torch
from torch import Tensor, nn
from torch.nn import functional

CHANNELS = (64, 64, 64, 64, 128, 128)
GROUPS = 8


class CausalConv3d(nn.Conv3d):
    """A 3x3x3 convolution that pads two zero frames in front; space is padded outside."""

    def __init__(self, channels, outputs, stride=(1, 1, 1)):
        super().__init__(channels, outputs, 3, stride)

    def forward(self, x, residual=None):
        y = super().forward(functional.pad(x, (0, 0, 0, 0, 2, 0)))
        return y if residual is None else y + residual


class FramewiseGroupNorm(nn.GroupNorm):
    """Group normalization whose statistics are those of single frames."""

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, frames, height, width = x.shape
        x = x.permute(0, 2, 1, 3, 4).contiguous().view(batch * frames, channels, 1, height, width)
        x = super().forward(x).view(batch, frames, channels, height, width)
        return x.permute(0, 2, 1, 3, 4).contiguous()


def reflect(x):
    return functional.pad(x, (1, 1, 1, 1, 0, 0), mode="reflect")


class ResnetBlock(nn.Module):
    def __init__(self, channels, outputs):
        super().__init__()
        self.norm1 = FramewiseGroupNorm(GROUPS, channels, eps=1e-6)
        self.conv1 = CausalConv3d(channels, outputs)
        self.norm2 = FramewiseGroupNorm(GROUPS, outputs, eps=1e-6)
        self.conv2 = CausalConv3d(outputs, outputs)
        self.shortcut = nn.Conv3d(channels, outputs, 1) if channels != outputs else None

    def forward(self, x):
        y = self.conv1(reflect(functional.silu(self.norm1(x))))
        y = self.conv2(reflect(functional.silu(self.norm2(y))))
        return (x if self.shortcut is None else self.shortcut(x)) + y


class Downsample(nn.Module):
    def __init__(self, channels, stride):
        super().__init__()
        self.conv = CausalConv3d(channels, channels, stride)

    def forward(self, x):
        return self.conv(functional.pad(x, (0, 1, 0, 1, 0, 0), mode="reflect"))


class DownBlock(nn.Module):
    def __init__(self, channels, outputs, stride):
        super().__init__()
        blocks = [ResnetBlock(channels, outputs), ResnetBlock(outputs, outputs)]
        self.resnets = nn.ModuleList(blocks)
        self.downsamplers = None
        if stride is not None:
            self.downsamplers = nn.ModuleList([Downsample(outputs, stride)])

    def forward(self, x):
        for block in self.resnets:
            x = block(x)
        return x if self.downsamplers is None else self.downsamplers[0](x)


class TinyEncoder(nn.Module):
    """RGB video ``[N, 3, T, H, W]`` to moments ``[N, 8, T', H', W']``."""

    def __init__(self):
        super().__init__()
        strides = [(1, 2, 2), (2, 2, 2), (1, 1, 1), (1, 1, 1), None, None]
        self.conv_in = CausalConv3d(3, CHANNELS[0])
        sources = (CHANNELS[0], *CHANNELS)
        self.down_blocks = nn.ModuleList(
            DownBlock(c, o, s) for c, o, s in zip(sources, CHANNELS, strides, strict=False)
        )
        self.norm_out = FramewiseGroupNorm(GROUPS, CHANNELS[-1], eps=1e-6)
        self.conv_out = CausalConv3d(CHANNELS[-1], 8)

    def forward(self, x):
        x = self.conv_in(reflect(x))
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(reflect(functional.silu(self.norm_out(x))))


def make_encoder():
    """A float16 encoder with weights that keep its activations near one."""
    torch.manual_seed(11)
    model = TinyEncoder().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            shift = 1.0 if name.endswith("weight") else 0.0
            parameter.copy_(torch.empty_like(parameter).uniform_(-0.4, 0.4) + shift)
        elif name.endswith("weight"):
            parameter.normal_(0, (2 / parameter[0].numel()) ** 0.5)
    return model.half()


def make_video(frames=3, size=16, seed=12):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, 3, frames, size, size), generator=generator).half()
