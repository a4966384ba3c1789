"""Bytes and words that hold 4-bit and 8-bit codes, lowest k in the lowest bits."""

import sys

import torch
from torch import Tensor

E2M1_VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
"""Value of each E2M1 code."""


def pack_nibbles(codes: Tensor) -> Tensor:
    """Packs uint8 codes 0..15 ``[..., K]``, K even, into bytes ``[..., K/2]``: even k low."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Returns uint8 codes ``[..., K]`` of bytes ``[..., K/2]``."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def to_unsigned(codes: Tensor, bits: int) -> Tensor:
    """Returns offset-binary uint8 codes ``q + 2^(bits-1)`` of int8 values."""
    return (codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)


def to_signed(codes: Tensor, bits: int) -> Tensor:
    """Returns int8 values of offset-binary uint8 codes."""
    return (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Packs uint8 codes ``[N, K]`` of 4 or 8 bits into int32 ``[N, K * bits / 32]``.

    K is a multiple of ``32 / bits``.
    """
    return _words(pack_nibbles(codes) if bits == 4 else codes, torch.int32)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Returns the uint8 codes ``[N, K]`` of int32 words ``[N, K * bits / 32]``."""
    packed = _words(words, torch.uint8)
    return unpack_nibbles(packed) if bits == 4 else packed


def _words(packed: Tensor, dtype: torch.dtype) -> Tensor:
    if sys.byteorder != "little":
        raise NotImplementedError("packed codes are read on little-endian machines only")
    return packed.contiguous().view(dtype)
