"""Projected heads and their quantization in float64, written for clarity."""

import hashlib
from itertools import pairwise

import torch


def project(inputs, projection):
    """Return float64 ``[B, H, S, D]``."""
    x = inputs.qdata.double() * inputs.scale.double()[..., None]
    weight = projection.qdata.double() * projection.scale.double()
    out = x @ weight.T
    if projection.bias is not None:
        out = out + projection.bias.double()
    return out.unflatten(-1, (-1, projection.head_dim)).transpose(1, 2)


def normalize_and_rotate(heads, transform):
    """Return float64 heads, pair by pair of features."""
    y = heads / (heads.pow(2).mean(-1, keepdim=True) + transform.eps).sqrt()
    if transform.weight is not None:
        y = y * transform.weight.double()
    cos, sin = transform.cos.double(), transform.sin.double()
    out, half = y.clone(), cos.shape[1] // 2
    for i in range(half):
        j = i + half
        out[..., i] = y[..., i] * cos[:, i] - y[..., j] * sin[:, i]
        out[..., j] = y[..., j] * cos[:, j] + y[..., i] * sin[:, j]
    return out


def signed_hadamard(width):
    """Return the orthogonal matrix ``diag(signs) @ H / sqrt(width)``."""
    digest = hashlib.sha256(b"piper-kernels/signed-hadamard/v1").digest()
    words = [int.from_bytes(digest[4 * i : 4 * i + 4], "big") for i in range(4)]
    signs = [1 if words[i // 32] >> (i % 32) & 1 else -1 for i in range(width)]
    rows = [[(-1) ** (i & j).bit_count() * signs[i] for j in range(width)] for i in range(width)]
    return torch.tensor(rows, dtype=torch.float64) / width**0.5


def exists(rows, lengths):
    """Return which of ``rows`` exist, bool ``[rows]``."""
    if lengths is None:
        return torch.ones(rows, dtype=torch.bool)
    return (torch.arange(64) < lengths[:, None]).flatten()


def blocks(heads, kept):
    """Yield the rows of every block of 64 that exist, ``[B, H, n, D]``."""
    edges = [*range(0, heads.shape[2], 64), heads.shape[2]]
    for first, last in pairwise(edges):
        yield heads[:, :, first:last][:, :, kept[first:last]]


def attention(query, key, value, scale, is_causal=False):
    """Return exact attention of float64 ``[B, H, S, D]``, key heads shared by groups."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.mT * scale
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ value
