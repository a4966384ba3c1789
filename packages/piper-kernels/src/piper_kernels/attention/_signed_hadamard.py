"""The fixed signed Hadamard rotation of queries and keys."""

import math

import torch
from torch import Tensor

# The first 128 bits of SHA-256 of "piper-kernels/signed-hadamard/v1", as big-endian words.
SIGN_WORDS = (0xF62B39F3, 0x802576E6, 0x910D4CFD, 0x4F877B5A)
HEAD_DIMS = (64, 128)
_WORD_BITS = 32


def hadamard_signs(head_dim: int, device: torch.device) -> Tensor:
    """Return the signs of the features, FP32 ``[head_dim]``.

    Feature ``i`` is kept where bit ``i % 32`` of word ``i // 32`` is set and negated elsewhere.
    They are computed on the device, so that nothing is copied during graph capture.

    Raises:
        ValueError: ``head_dim`` is neither 64 nor 128.
    """
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"the signed Hadamard rotation needs head_dim 64 or 128, got {head_dim}")
    bits = torch.arange(_WORD_BITS, dtype=torch.int64, device=device)
    words = SIGN_WORDS[: head_dim // _WORD_BITS]
    set_bits = torch.cat([torch.bitwise_right_shift(word, bits) & 1 for word in words])
    return (2 * set_bits - 1).float()


def rotate(x: Tensor) -> Tensor:
    """Rotate the rows of FP32 ``[..., D]`` by ``(x * signs) @ H_D / sqrt(D)``.

    ``H_D`` is the Hadamard matrix in natural order, applied in FP32 as butterflies of distance
    1, 2, ..., D/2. The map is an isometry: products of two rotated rows are those of the rows.

    Raises:
        ValueError: ``D`` is neither 64 nor 128.
    """
    head_dim = x.shape[-1]
    x = x * hadamard_signs(head_dim, x.device)
    distance = 1
    while distance < head_dim:
        pairs = x.unflatten(-1, (head_dim // (2 * distance), 2, distance))
        low, high = pairs.unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        distance *= 2
    return x * (1.0 / math.sqrt(head_dim))
