"""Sizes of the Wan 2.2 VAE, as ``vae/config.json`` states them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from math import prod
from typing import Any

LATENTS_MEAN = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813,
    0.0891, 0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108,
    -0.2158, 0.2502, -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313,
    -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944,
    0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
"""Channel means of the published Wan 2.2 latents."""

LATENTS_STD = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip
"""Channel deviations of the published Wan 2.2 latents."""

Factors = tuple[int, int, int]
"""Frames, rows and columns of a cell."""

_IGNORED = ("_class_name", "_diffusers_version", "_name_or_path", "clip_output", "dropout")
_FIXED = {"is_residual": True, "patch_size": 2, "attn_scales": ()}
_COUNTS = ("z_dim", "base_dim", "decoder_base_dim", "num_res_blocks")
_FACTORS = ("in_channels", "out_channels", "scale_factor_spatial", "scale_factor_temporal")


@dataclass(frozen=True)
class WanVAEConfig:
    """The sizes; the defaults are those of Wan 2.2.

    Attributes:
        z_dim: channels of the latents.
        base_dim: width of the encoder's first block.
        decoder_base_dim: width of the decoder's last block.
        dim_mult: width of each block in units of the base.
        num_res_blocks: residual blocks of an encoder block; a decoder block has one more.
        temperal_downsample: whether each step between two blocks halves the frame rate (sic).
        latents_mean: of each latent channel.
        latents_std: of each latent channel.
    """

    z_dim: int = 48
    base_dim: int = 160
    decoder_base_dim: int = 256
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] = LATENTS_MEAN
    latents_std: tuple[float, ...] = LATENTS_STD

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _check(name, getattr(self, name), _is_count(getattr(self, name)), "a positive integer")
        for name in ("base_dim", "decoder_base_dim"):
            width = getattr(self, name)
            _check(name, width, width % 8 == 0, "a multiple of 8, one access in half precision")
        blocks = len(self.dim_mult)
        whole = blocks > 0 and all(map(_is_count, self.dim_mult))
        _check("dim_mult", self.dim_mult, whole, "positive integers")
        flags = self.temperal_downsample
        right = len(flags) == blocks - 1 and all(isinstance(flag, bool) for flag in flags)
        _check(
            "temperal_downsample", flags, right, f"{blocks - 1} booleans, one less than dim_mult"
        )
        for name in ("latents_mean", "latents_std"):
            values = getattr(self, name)
            right = len(values) == self.z_dim and all(isinstance(v, int | float) for v in values)
            _check(
                name, values, right, f"{self.z_dim} numbers, one for each latent channel (z_dim)"
            )
        _check("latents_std", self.latents_std, min(self.latents_std) > 0, "positive numbers")
        self._check_shortcuts()

    def _check_shortcuts(self) -> None:
        for index, (inputs, outputs) in enumerate(pairwise(self.encoder_widths)):
            gathered = inputs * self.down_factors(index)[0]
            _check("dim_mult", self.dim_mult, gathered % outputs == 0, "widths that divide")
        for index in range(len(self.temperal_downsample)):
            inputs, outputs = self.decoder_widths[index : index + 2]
            spread_axes(outputs, inputs, self.up_factors(index))

    @property
    def spatial(self) -> int:
        """Pixels of one latent cell in each direction."""
        return 2 ** len(self.dim_mult)

    @property
    def temporal(self) -> int:
        """Pixel frames of one latent frame behind the first."""
        return 2 ** sum(self.temperal_downsample)

    @property
    def encoder_widths(self) -> tuple[int, ...]:
        """Width before the first encoder block and behind each."""
        return tuple(self.base_dim * factor for factor in (1, *self.dim_mult))

    @property
    def decoder_widths(self) -> tuple[int, ...]:
        """Width before the first decoder block and behind each."""
        mult = (self.dim_mult[-1], *reversed(self.dim_mult))
        return tuple(self.decoder_base_dim * factor for factor in mult)

    def down_factors(self, block: int) -> Factors:
        """Frames, rows and columns that an encoder block merges into one."""
        if block == len(self.temperal_downsample):
            return 1, 1, 1
        return 1 + self.temperal_downsample[block], 2, 2

    def up_factors(self, block: int) -> Factors:
        """Frames, rows and columns that a decoder block makes of one."""
        return self.down_factors(len(self.temperal_downsample) - 1 - block)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "WanVAEConfig":
        """Reads the fields of ``vae/config.json``.

        Raises:
            ValueError: for fields that are unknown, contradict each other or are not Wan 2.2's.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known - set(_IGNORED) - set(_FIXED) - set(_FACTORS))
        if unknown:
            raise ValueError(
                f"the VAE config has unknown fields {', '.join(unknown)}; known are "
                f"{', '.join(sorted(known | set(_FIXED) | set(_FACTORS)))}"
            )
        for name, needed in _FIXED.items():
            seen = values.get(name, needed)
            seen = tuple(seen) if isinstance(seen, list) else seen
            _check(name, seen, seen == needed, f"{needed!r}: only Wan 2.2's layout is implemented")
        taken: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if name in known
        }
        config = cls(**taken)
        derived = (12, 12, config.spatial, config.temporal)
        for name, needed in zip(_FACTORS, derived, strict=True):
            seen = values.get(name, needed)
            _check(name, seen, seen == needed, f"{needed}, which follows from the other fields")
        return config


def spread_axes(width: int, channels: int, factors: Factors) -> Factors:
    """Returns the cell along whose axes the channels of a decoder block's input differ.

    Channels are repeated until they fill ``width`` channels of cells, (channel, frame, row,
    column) from slow to fast, so they differ along the slow axes and repeat along the fast ones.

    Raises:
        ValueError: if the widths do not fit the cell.
    """
    repeats = width * prod(factors) // channels
    kept = list(factors)
    for axis in (2, 1, 0):
        if repeats > 1:
            repeats //= kept[axis]
            kept[axis] = 1
    if width * prod(kept) != channels:
        raise ValueError(
            f"the VAE config makes {width} channels of {channels} in cells of {factors}; the "
            "widths of dim_mult must be equal or double"
        )
    return kept[0], kept[1], kept[2]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check(name: str, value: object, right: bool, needed: str) -> None:
    if not right:
        raise ValueError(f"the VAE config has {name} = {value!r}; it must be {needed}")
