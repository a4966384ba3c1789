"""Encoder and decoder: each maps one chunk of a clip and keeps its state in a stream."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from phyai.models.cosmos3.vae.blocks import DownBlock, MiddleBlock, UpBlock
from phyai.models.cosmos3.vae.config import WanVAEConfig
from phyai.models.cosmos3.vae.convs import Build, CausalConv, with_room
from phyai.models.cosmos3.vae.pixels import CELL, to_frames
from phyai.models.cosmos3.vae.rows import ChannelNorm
from phyai.models.cosmos3.vae.stream import Stream


class Head(nn.Module):
    """Norm, SiLU and the last convolution.

    Args:
        width: channels before.
        outputs: channels behind.
        prefix: stored name of the part.
        build: of the model.
    """

    def __init__(self, width: int, outputs: int, *, prefix: str, build: Build) -> None:
        super().__init__()
        self.norm: ChannelNorm = ChannelNorm(
            width, prefix=f"{prefix}.norm_out", device=build.device
        )
        self.conv: CausalConv = CausalConv(width, outputs, prefix=f"{prefix}.conv_out", build=build)

    def forward(self, x: Tensor, stream: Stream | None) -> Tensor:
        """Maps [T, H, W, width] to [T, H, W, outputs]."""
        return self.conv(self.norm(x, lead=self.conv.lead(stream)), stream)


class Encoder(nn.Module):
    """Pixels to moments of latents: 1 frame to one, then 4 frames to one.

    Args:
        config: sizes.
        build: how weights are kept.
    """

    def __init__(self, config: WanVAEConfig, build: Build) -> None:
        super().__init__()
        self.dtype: torch.dtype = build.dtype
        widths = config.encoder_widths
        self.conv_in: CausalConv = CausalConv(
            CELL, widths[0], prefix="encoder.conv_in", build=build
        )
        self.down_blocks: nn.ModuleList = nn.ModuleList(
            DownBlock(
                inputs,
                outputs,
                config.num_res_blocks,
                config.down_factors(index),
                prefix=f"encoder.down_blocks.{index}",
                build=build,
            )
            for index, (inputs, outputs) in enumerate(pairwise(widths))
        )
        self.mid_block: MiddleBlock = MiddleBlock(
            widths[-1], prefix="encoder.mid_block", build=build
        )
        self.head: Head = Head(widths[-1], 2 * config.z_dim, prefix="encoder", build=build)

    def forward(self, pixels: Tensor, stream: Stream | None = None) -> Tensor:
        """Encodes a chunk.

        Args:
            pixels: [3, T, H, W], T = 1 in the first chunk of a clip and 4 later.
            stream: of the clip, None if it has one frame alone.

        Returns:
            Moments [1, H / 16, W / 16, 2 * z_dim]: means, then logarithms of variances.
        """
        x = to_frames(pixels.to(self.dtype))
        x = self.conv_in(with_room(x, self.conv_in.lead(stream)), stream)
        for block in self.down_blocks:
            x = block(x, stream)
        return self.head(self.mid_block(x, stream), stream)


class Decoder(nn.Module):
    """Latents to cells of pixels: the first frame to one, each later one to 4.

    Args:
        config: sizes.
        build: how weights are kept.
    """

    def __init__(self, config: WanVAEConfig, build: Build) -> None:
        super().__init__()
        widths = config.decoder_widths
        self.conv_in: CausalConv = CausalConv(
            config.z_dim, widths[0], prefix="decoder.conv_in", build=build
        )
        self.mid_block: MiddleBlock = MiddleBlock(
            widths[0], prefix="decoder.mid_block", build=build
        )
        self.up_blocks: nn.ModuleList = nn.ModuleList(
            UpBlock(
                inputs,
                outputs,
                config.num_res_blocks + 1,
                config.up_factors(index) if index < len(widths) - 2 else (1, 1, 1),
                prefix=f"decoder.up_blocks.{index}",
                build=build,
            )
            for index, (inputs, outputs) in enumerate(pairwise(widths))
        )
        self.head: Head = Head(widths[-1], CELL, prefix="decoder", build=build)

    def forward(self, latents: Tensor, stream: Stream | None = None) -> Tensor:
        """Decodes one latent frame.

        Args:
            latents: [1, h, w, z_dim].
            stream: of the clip, None if it has one frame alone.

        Returns:
            [1 or 4, 8 * h, 8 * w, 12], what `to_pixels` takes.
        """
        x = self.conv_in(with_room(latents, self.conv_in.lead(stream)), stream)
        x = self.mid_block(x, stream)
        for block in self.up_blocks:
            x = block(x, stream)
        return self.head(x, stream)
