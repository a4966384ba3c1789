"""Sizes of the sound decoder, as ``sound_tokenizer/config.json`` states them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from math import ceil, prod
from typing import Any

_FIXED = {
    "model_type": "autoencoder_v2",
    "dec_type": "oobleck",
    "dec_use_snake": True,
    "dec_final_tanh": False,
    "dec_use_tanh_at_final": False,
    "dec_anti_aliasing": False,
    "dec_use_nearest_upsample": False,
    "activation": "snakebeta",
    "snake_logscale": True,
    "anti_aliasing": False,
    "bottleneck_type": "vae",
    "latent_mean": None,
    "latent_std": None,
}
_UNREAD = (
    "bottleneck",
    "causal",
    "input_channels",
    "normalize_volume",
    "padding_mode",
    "stereo",
    "use_cuda_kernel",
    "use_wav_as_input",
)
_UNREAD_PREFIXES = ("_", "enc_", "encoder_")


@dataclass(frozen=True)
class SoundConfig:
    """The sizes; the defaults are those of the published decoder.

    Attributes:
        vocoder_input_dim: channels of the latents.
        dec_dim: width of the last block.
        dec_c_mults: width before each block in units of ``dec_dim``, last block first.
        dec_strides: samples that each block makes of one, last block first.
        dec_out_channels: audio channels.
        sampling_rate: samples a second.
    """

    vocoder_input_dim: int = 64
    dec_dim: int = 320
    dec_c_mults: tuple[int, ...] = (1, 2, 4, 8, 16)
    dec_strides: tuple[int, ...] = (2, 4, 5, 6, 8)
    dec_out_channels: int = 2
    sampling_rate: int = 48000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not numbers or not all(
                isinstance(number, int) and not isinstance(number, bool) and number > 0
                for number in numbers
            ):
                raise ValueError(
                    f"the sound config has {field.name} = {value!r}; it must be positive integers"
                )
        if len(self.dec_strides) != len(self.dec_c_mults):
            raise ValueError(
                f"the sound config has {len(self.dec_strides)} dec_strides and "
                f"{len(self.dec_c_mults)} dec_c_mults; each block needs one of both"
            )

    @property
    def hop(self) -> int:
        """Samples of one latent frame."""
        return prod(self.dec_strides)

    @property
    def blocks(self) -> list[tuple[int, int, int]]:
        """Width before, width behind and stride of each block, first block first."""
        widths = [*(self.dec_dim * factor for factor in reversed(self.dec_c_mults)), self.dec_dim]
        return [
            (inputs, outputs, stride)
            for (inputs, outputs), stride in zip(
                pairwise(widths), reversed(self.dec_strides), strict=True
            )
        ]

    def frames(self, num_frames: int, fps: float) -> int:
        """Returns the latent frames of the sound of a clip: whole ones that cover its samples.

        Args:
            num_frames: pixel frames of the clip.
            fps: pixel frames a second.

        Raises:
            ValueError: for a clip without duration.
        """
        if num_frames < 1 or not fps > 0:
            raise ValueError(f"a clip of {num_frames} frames at {fps} a second has no sound")
        return ceil(int(num_frames / fps * self.sampling_rate) / self.hop)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SoundConfig":
        """Reads the fields of ``sound_tokenizer/config.json`` that the decoder needs.

        Raises:
            ValueError: for fields that are unknown, contradict each other, or ask for another kind
                of decoder.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(
            name
            for name in values
            if name not in known | set(_FIXED) | set(_UNREAD) | {"hop_size"}
            and not name.startswith(_UNREAD_PREFIXES)
        )
        if unknown:
            raise ValueError(
                f"the sound config has unknown fields {', '.join(unknown)}; known are "
                f"{', '.join(sorted(known | set(_FIXED)))}"
            )
        for name, needed in _FIXED.items():
            if values.get(name, needed) != needed:
                raise ValueError(
                    f"the sound config has {name} = {values[name]!r}; it must be {needed!r}: only "
                    "the published kind of decoder is implemented"
                )
        taken: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if name in known
        }
        config = cls(**taken)
        if values.get("hop_size") not in (None, config.hop):
            raise ValueError(
                f"the sound config has hop_size = {values['hop_size']!r}, but its dec_strides "
                f"multiply to {config.hop}"
            )
        return config
