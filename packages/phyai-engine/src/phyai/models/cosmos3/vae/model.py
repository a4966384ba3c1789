"""The VAE of Wan 2.2: pixels to normalised latents and back."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from phyai.models.cosmos3.vae.coders import Decoder, Encoder
from phyai.models.cosmos3.vae.config import WanVAEConfig
from phyai.models.cosmos3.vae.convs import Build, Layout, PointConv
from phyai.models.cosmos3.vae.pixels import CELL, PATCH, to_pixels
from phyai.models.cosmos3.vae.stream import Stream
from phyai.models.cosmos3.vae.tiling import TileConfig, scaled, tiles

Part = Literal["encoder", "decoder"]
PARTS: tuple[Part, ...] = ("encoder", "decoder")


class WanVAE(nn.Module):
    """Encoder and decoder of Wan 2.2, or one of them.

    Clips go through in chunks with a bounded state: the encoder takes 1 frame and then 4 at a time,
    the decoder one latent frame at a time. Norms reduce in fp32; fp32 models compute in fp32. On a
    GPU the first clip of a size takes longer, because cuDNN measures its algorithms.

    Args:
        config: sizes.
        parts: what to build; a policy needs the encoder alone.
        dtype: of weights and activations.
        device: where the weights live.
        layout: how convolutions over time are computed, see `Build`.
        tiling: decode in overlapping tiles; None decodes whole frames.
    """

    def __init__(
        self,
        config: WanVAEConfig,
        *,
        parts: Sequence[Part] = PARTS,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layout: Layout = "volume",
        tiling: TileConfig | None = None,
    ) -> None:
        super().__init__()
        if not parts or not set(parts) <= set(PARTS):
            raise ValueError(f"a VAE has the parts {PARTS}, got {tuple(parts)}")
        self.config = config
        self.tiling = tiling
        latent = config.z_dim
        build = Build(dtype, device, layout)
        self.encoder: Encoder | None = None
        self.decoder: Decoder | None = None
        self.quant_conv: PointConv | None = None
        self.post_quant_conv: PointConv | None = None
        if "encoder" in parts:
            self.encoder = Encoder(config, Build(dtype, device, layout, folded=True))
            self.quant_conv = PointConv(2 * latent, 2 * latent, prefix="quant_conv", build=build)
        if "decoder" in parts:
            self.decoder = Decoder(config, build)
            self.post_quant_conv = PointConv(latent, latent, prefix="post_quant_conv", build=build)
        self._mean, self._std = (
            nn.Buffer(torch.tensor(values, device=device), persistent=False)
            for values in (config.latents_mean, config.latents_std)
        )

    @classmethod
    def from_config(cls, values: Mapping[str, Any], **options: Any) -> "WanVAE":
        """Builds a model without weights from ``vae/config.json``; see the class for options."""
        return cls(WanVAEConfig.from_dict(values), **options)

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self._mean.device

    def encode(self, pixels: Tensor, *, frames: int | None = None) -> Tensor:
        """Encodes a clip, or the part of it that conditions a sample.

        Args:
            pixels: [3, 1 + 4 k, H, W] in [-1, 1], H and W multiples of 16.
            frames: latent frames to encode; later ones are zeros and their pixels are not read.
                All if None.

        Returns:
            Normalised means [z_dim, 1 + k, H / 16, W / 16] in fp32.

        Raises:
            ValueError: if the shape does not fit, or the model has no encoder.
        """
        if self.encoder is None or self.quant_conv is None:
            raise ValueError('this VAE has no encoder; load it with parts=("encoder", "decoder")')
        step, cell = self.config.temporal, self.config.spatial
        _check_pixels(pixels, step, cell)
        total = 1 + (pixels.shape[1] - 1) // step
        count = total if frames is None else frames
        if not 1 <= count <= total:
            raise ValueError(f"the clip has {total} latent frames, cannot encode {count} of them")
        shape = (self.config.z_dim, total, pixels.shape[2] // cell, pixels.shape[3] // cell)
        latents = torch.zeros(shape, device=pixels.device)
        stream = Stream() if count > 1 else None
        with _convolutions(pixels.device):
            for index in range(count):
                stop = 1 + step * index
                chunk = pixels[:, max(0, stop - step) : stop]
                latents[:, index] = self._normalised(self.encoder(chunk, stream))
        return latents

    def _normalised(self, moments: Tensor) -> Tensor:
        assert self.quant_conv is not None
        means = self.quant_conv(moments)[0, ..., : self.config.z_dim].float()
        return ((means - self._mean) / self._std).permute(2, 0, 1)

    def encode_frame(self, pixels: Tensor) -> Tensor:
        """Encodes one image, exactly as the first frame of any clip, by convolutions in 2-D.

        Args:
            pixels: [3, H, W] in [-1, 1], H and W multiples of 16.

        Returns:
            Normalised means [z_dim, H / 16, W / 16] in fp32.

        Raises:
            ValueError: if the shape does not fit, or the model has no encoder.
        """
        if pixels.ndim != 3:
            raise ValueError(f"an image must be [3, H, W], got {list(pixels.shape)}")
        return self.encode(pixels.unsqueeze(1))[:, 0]

    def decode(self, latents: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
        """Decodes a clip, tile by tile if the model has a tiling.

        Args:
            latents: normalised [z_dim, T, h, w].
            group: ranks that share the tiles; each gets the whole result.

        Returns:
            Pixels [3, 1 + 4 (T - 1), 16 h, 16 w] in [-1, 1], in the dtype of the model.

        Raises:
            ValueError: if the shape does not fit, the model has no decoder, or a group is given to
                a model without tiling.
        """
        if self.tiling is None and group is not None:
            raise ValueError("ranks share tiles, but this VAE has no tiling; set vae.tiling")
        frames = self._frames(latents)
        if self.tiling is not None:
            return to_pixels(self._decode_tiles(frames, self.tiling, group)).to(frames.dtype)
        count, cell = 1 + self.config.temporal * (len(frames) - 1), self.config.spatial
        shape = (3, count, cell * frames.shape[1], cell * frames.shape[2])
        pixels = torch.empty(shape, dtype=frames.dtype, device=frames.device)
        start = 0
        for part in self._groups(frames):
            pixels[:, start : start + len(part)] = to_pixels(part)
            start += len(part)
        return pixels

    def _decode_tiles(
        self, frames: Tensor, tiling: TileConfig, group: ProcessGroup | None
    ) -> Tensor:
        """Decodes [T, h, w, z_dim] to blended cells [1 + 4 (T - 1), 8 h, 8 w, 12] in fp32."""
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        count, cell = 1 + self.config.temporal * (len(frames) - 1), self.config.spatial // PATCH
        rows, columns = frames.shape[1:3]
        blend = torch.zeros(count, cell * rows, cell * columns, CELL, device=frames.device)
        for index, tile in enumerate(tiles(rows, columns, tiling, cell, frames.device)):
            if index % ranks != rank:
                continue
            area = blend[:, scaled(tile.rows, cell), scaled(tile.columns, cell)]
            start = 0
            for part in self._groups(frames[:, tile.rows, tile.columns]):
                area[start : start + len(part)] += part * tile.weights
                start += len(part)
        if group is not None:
            torch.distributed.all_reduce(blend, group=group)
        return blend

    def decode_stream(self, latents: Tensor) -> Iterator[Tensor]:
        """Decodes a clip one latent frame at a time.

        With a tiling the whole clip is decoded before the first group comes: tiles are decoded one
        after the other.

        Args:
            latents: normalised [z_dim, T, h, w].

        Yields:
            Pixels [3, 1, 16 h, 16 w], then [3, 4, 16 h, 16 w], in [-1, 1].

        Raises:
            ValueError: if the shape does not fit, or the model has no decoder.
        """
        frames = self._frames(latents)
        if self.tiling is None:
            return map(to_pixels, self._groups(frames))
        counts = [1] + [self.config.temporal] * (len(frames) - 1)
        return iter(self.decode(latents).split(counts, dim=1))

    def _frames(self, latents: Tensor) -> Tensor:
        """Returns latents as [T, h, w, z_dim], as the decoder was trained to see them."""
        if self.decoder is None or self.post_quant_conv is None:
            raise ValueError('this VAE has no decoder; load it with parts=("encoder", "decoder")')
        width = self.config.z_dim
        if latents.ndim != 4 or latents.shape[0] != width or latents.numel() == 0:
            raise ValueError(f"latents must be [{width}, T, h, w], got {list(latents.shape)}")
        scaled = latents.permute(1, 2, 3, 0).float() * self._std + self._mean
        return self.post_quant_conv(scaled.to(self.post_quant_conv.weight.dtype))

    def _groups(self, frames: Tensor) -> Iterator[Tensor]:
        """Yields the cells of one latent frame after the other."""
        assert self.decoder is not None
        stream = Stream() if len(frames) > 1 else None
        for frame in frames.split(1):
            with _convolutions(frames.device):
                cells = self.decoder(frame.contiguous(), stream)
            yield cells


def _check_pixels(pixels: Tensor, step: int, cell: int) -> None:
    """Raises if ``pixels`` is not a clip of whole chunks and whole latent cells."""
    shape = list(pixels.shape)
    if pixels.ndim != 4 or shape[0] != 3 or not pixels.is_floating_point():
        raise ValueError(
            f"a clip must be [3, T, H, W] in floating point, got {shape} in {pixels.dtype}"
        )
    if shape[1] % step != 1:
        raise ValueError(
            f"a clip must have 1 + {step} k frames, got {shape[1]}; repeat its last frame or cut it"
        )
    if 0 in shape or shape[2] % cell or shape[3] % cell:
        raise ValueError(
            f"height and width must be multiples of {cell} pixels, got {shape[2]} x {shape[3]}; "
            "pad or crop the frames"
        )


def _convolutions(device: torch.device) -> AbstractContextManager[None]:
    """Lets cuDNN measure which algorithm is fastest, and keeps fp32 convolutions in fp32."""
    if device.type != "cuda":
        return nullcontext()
    return torch.backends.cudnn.flags(
        enabled=True, benchmark=True, deterministic=False, allow_tf32=False
    )
