"""Random-looking tensors that depend on a name and a shape alone.

The same numbers on every device and with every version of PyTorch, without phyai itself: scripts
that compare with other libraries in environments of their own load this file alone.
"""

from zlib import crc32

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def hashed(name: str, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Returns fp32 values, uniform between -1 and 1.

    The finaliser of MurmurHash3 over the index of each value and the checksum of the name.
    """
    words = torch.arange(torch.Size(shape).numel(), device=device)
    words = (words * 0x9E3779B1 + crc32(name.encode())) & _WORD
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = ((words ^ (words >> shift)) * factor) & _WORD
    words ^= words >> 16
    return ((words.double() + 0.5) / 2**31 - 1).float().view(shape)


def hashed_weight(name: str, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Returns a stored tensor of the VAE or of the sound decoder that keeps activations near 1.

    Gains of norms lie in 0.5 to 1.5, biases and logarithms of Snake within 0.1, convolutions have
    the variance of one over their inputs, and rows of normed weights have lengths near 0.5.
    """
    values = hashed(name, shape, device)
    if name.endswith("gamma"):
        return 1 + 0.5 * values
    if name.endswith("weight_g"):
        return 0.5 + 0.25 * values
    if name.endswith("weight"):
        return (3 / torch.Size(shape[1:]).numel()) ** 0.5 * values
    return values if name.endswith("weight_v") else 0.1 * values
