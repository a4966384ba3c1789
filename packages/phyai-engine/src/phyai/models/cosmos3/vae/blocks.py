"""Blocks of encoder and decoder over frames [T, H, W, C]."""

from torch import Tensor, nn
from torch.nn import functional

from phyai.models.cosmos3.vae.config import Factors
from phyai.models.cosmos3.vae.convs import Build, CausalConv, PointConv
from phyai.models.cosmos3.vae.resample import (
    DownSpace,
    DownTime,
    UpSpace,
    UpTime,
    merged,
)
from phyai.models.cosmos3.vae.rows import ChannelNorm, add_bias_residual
from phyai.models.cosmos3.vae.stream import Stream


class ResidualBlock(nn.Module):
    """Norm, SiLU and causal convolution, twice, around a shortcut.

    Args:
        inputs: channels before.
        outputs: channels behind.
        prefix: stored name.
        build: of the model.
    """

    conv1: CausalConv
    conv2: CausalConv

    def __init__(self, inputs: int, outputs: int, *, prefix: str, build: Build) -> None:
        super().__init__()
        self.norm1: ChannelNorm = ChannelNorm(inputs, prefix=f"{prefix}.norm1", device=build.device)
        self.norm2: ChannelNorm = ChannelNorm(
            outputs, prefix=f"{prefix}.norm2", device=build.device
        )
        self.conv1, self.conv2 = (
            CausalConv(width, outputs, prefix=f"{prefix}.{name}", build=build, bias_apart=True)
            for name, width in (("conv1", inputs), ("conv2", outputs))
        )
        self.shortcut: PointConv | nn.Identity = (
            PointConv(inputs, outputs, prefix=f"{prefix}.conv_shortcut", build=build)
            if inputs != outputs
            else nn.Identity()
        )

    def forward(self, x: Tensor, stream: Stream | None) -> Tensor:
        """Maps [T, H, W, inputs] to [T, H, W, outputs]."""
        hidden = self.conv1(self.norm1(x, lead=self.conv1.lead(stream)), stream)
        hidden = self.norm2(hidden, self.conv1.bias, lead=self.conv2.lead(stream))
        return add_bias_residual(self.conv2(hidden, stream), self.conv2.bias, self.shortcut(x))


class AttentionBlock(nn.Module):
    """Attention with one head over the positions of each frame, around a shortcut.

    Args:
        width: channels, which are also the head's.
        prefix: stored name.
        build: of the model.
    """

    def __init__(self, width: int, *, prefix: str, build: Build) -> None:
        super().__init__()
        self.norm: ChannelNorm = ChannelNorm(
            width, prefix=f"{prefix}.norm", silu=False, axes=2, device=build.device
        )
        self.qkv: PointConv = PointConv(
            width, 3 * width, prefix=f"{prefix}.to_qkv", axes=2, build=build
        )
        self.proj: PointConv = PointConv(width, width, prefix=f"{prefix}.proj", axes=2, build=build)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [T, H, W, C] to the same shape."""
        query, key, value = self.qkv(self.norm(x)).flatten(1, 2).unsqueeze(1).chunk(3, dim=-1)
        attended = functional.scaled_dot_product_attention(query, key, value)
        return x + self.proj(attended.view(x.shape))


class MiddleBlock(nn.Module):
    """Residual block, attention, residual block.

    Args:
        width: channels.
        prefix: stored name.
        build: of the model.
    """

    first: ResidualBlock
    last: ResidualBlock

    def __init__(self, width: int, *, prefix: str, build: Build) -> None:
        super().__init__()
        self.first, self.last = (
            ResidualBlock(width, width, prefix=f"{prefix}.resnets.{index}", build=build)
            for index in range(2)
        )
        self.attention: AttentionBlock = AttentionBlock(
            width, prefix=f"{prefix}.attentions.0", build=build
        )

    def forward(self, x: Tensor, stream: Stream | None) -> Tensor:
        """Maps [T, H, W, C] to the same shape."""
        return self.last(self.attention(self.first(x, stream)), stream)


def _residual_blocks(
    inputs: int, outputs: int, count: int, *, prefix: str, build: Build
) -> nn.ModuleList:
    return nn.ModuleList(
        ResidualBlock(
            inputs if index == 0 else outputs,
            outputs,
            prefix=f"{prefix}.resnets.{index}",
            build=build,
        )
        for index in range(count)
    )


class DownBlock(nn.Module):
    """Residual blocks and a step to a lower resolution, around a shortcut that averages.

    Args:
        inputs: channels before.
        outputs: channels behind.
        count: residual blocks.
        factors: frames, rows and columns that become one.
        prefix: stored name.
        build: of the model.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        count: int,
        factors: Factors,
        *,
        prefix: str,
        build: Build,
    ) -> None:
        super().__init__()
        self.outputs = outputs
        self.factors = factors
        self.resnets: nn.ModuleList = _residual_blocks(
            inputs, outputs, count, prefix=prefix, build=build
        )
        step = f"{prefix}.downsampler"
        time, rows, _ = factors
        self.space: DownSpace | None = (
            DownSpace(outputs, prefix=f"{step}.resample.1", build=build) if rows > 1 else None
        )
        self.time: DownTime | None = (
            DownTime(outputs, prefix=f"{step}.time_conv", build=build) if time > 1 else None
        )

    def forward(self, x: Tensor, stream: Stream | None) -> Tensor:
        """Maps [T, H, W, inputs] to [T / time, H / rows, W / columns, outputs]."""
        shortcut = merged(x, self.factors, self.outputs)
        for block in self.resnets:
            x = block(x, stream)
        if self.space is not None:
            x = self.space(x)
        if self.time is not None:
            x = self.time(x, stream)
        return x + shortcut


class UpBlock(nn.Module):
    """Residual blocks and a step to a higher resolution, around a shortcut that repeats.

    Args:
        inputs: channels before.
        outputs: channels behind.
        count: residual blocks.
        factors: frames, rows and columns that one becomes; without a step there is no shortcut.
        prefix: stored name.
        build: of the model.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        count: int,
        factors: Factors,
        *,
        prefix: str,
        build: Build,
    ) -> None:
        super().__init__()
        self.resnets: nn.ModuleList = _residual_blocks(
            inputs, outputs, count, prefix=prefix, build=build
        )
        step = f"{prefix}.upsampler"
        time, rows, _ = factors
        self.space: UpSpace | None = (
            UpSpace(outputs, factors, prefix=f"{step}.resample.1", build=build)
            if rows > 1
            else None
        )
        self.time: UpTime | None = (
            UpTime(outputs, prefix=f"{step}.time_conv", build=build) if time > 1 else None
        )

    def forward(self, x: Tensor, stream: Stream | None) -> Tensor:
        """Maps [T, H, W, inputs] to [T * time, H * rows, W * columns, outputs]."""
        source = x
        for block in self.resnets:
            x = block(x, stream)
        if self.time is not None:
            x = self.time(x, stream)
        return x if self.space is None else self.space(x, source)
