"""Tokens of the video block's benchmark and exact rows of what a block adds to them.

The exact rows are computed in FP32 from the bf16 weights, by the formulas of the block and of
the README of sparse Piper attention, without an operator of this library.
"""

from typing import Any

import torch
from _harness import device
from torch import Tensor
from torch.nn import functional

TILE = 64
CHECKED_TILES = 4
SHARED = 0.9


def video_tokens(tokens: int, width: int, seed: int = 3) -> Tensor:
    """Return bf16 ``[1, tokens, width]`` of variance 1 in which 64 neighbours are much alike.

    Nine tenths of the variance are those of a run of 64 tokens. Attention to independent
    tokens would be a mean of noise, and no block would be more worth reading than another.
    """
    generator = torch.Generator(device()).manual_seed(seed)

    def random(rows: int) -> Tensor:
        return torch.randn(rows, width, generator=generator, device=device())

    runs = random(-(-tokens // TILE)).repeat_interleave(TILE, 0)[:tokens]
    mixed = SHARED**0.5 * runs + (1 - SHARED) ** 0.5 * random(tokens)
    return mixed.bfloat16()[None]


def checked_rows(tokens: int) -> Tensor:
    """Return the rows that are compared: whole tiles from the first to the last."""
    tiles = tokens // TILE
    chosen = torch.linspace(0, tiles - 1, min(tiles, CHECKED_TILES), device=device()).long()
    return (chosen[:, None] * TILE + torch.arange(TILE, device=device())).flatten()


def exact_change(block: Any, x: Tensor, cos: Tensor, sin: Tensor, rows: Tensor) -> Tensor:
    """Return what a block adds to some rows of its input.

    Args:
        block: A block with bf16 weights; its attention decides what is computed.
        x: bf16 ``[1, S, width]``, ``S`` a multiple of 64.
        cos: FP32 ``[S, D]``.
        sin: Like ``cos``.
        rows: Rows of whole tiles of 64.

    Returns:
        FP32 ``[rows, width]``.
    """
    attention, tables = block.attention, (cos, sin)
    normed = _norm(block.attention_norm, x[0].float())
    kept = normed[rows]
    query = _turned(attention.query, attention.query_norm, kept, [t[rows] for t in tables])
    key = _turned(attention.key, attention.key_norm, normed, tables)
    value = _heads(attention.value, normed, attention.config.head_dim)
    del normed
    sparse = attention.config.attention == "sparse"
    gate = _heads(attention.gate, kept, attention.config.head_dim) if sparse else None
    parts = []
    for head in range(query.shape[1]):
        operands = (query[:, head], key[:, head], value[:, head])
        if gate is None:
            parts.append(_attend(*operands))
        else:
            parts.append(_sparse(*operands, gate[:, head], attention.config.keep))
    added = _linear(attention.out, torch.cat(parts, -1))
    middle = x[0, rows].float() + added
    normed = _norm(block.ffn_norm, middle)
    inner = functional.silu(_linear(block.ffn.gate, normed)) * _linear(block.ffn.value, normed)
    return added + _linear(block.ffn.down, inner)


def _linear(linear: Any, x: Tensor) -> Tensor:
    return x @ linear.weight.float().T


def _heads(linear: Any, x: Tensor, head_dim: int) -> Tensor:
    return _linear(linear, x).unflatten(-1, (-1, head_dim))


def _norm(norm: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def _turned(linear: Any, norm: Any, x: Tensor, tables: Any) -> Tensor:
    """Return projected heads ``[rows, H, D]`` after norm and split-half RoPE."""
    heads = _norm(norm, _heads(linear, x, tables[0].shape[-1]))
    cos, sin = (table[:, None] for table in tables)
    low, high = heads.chunk(2, -1)
    return heads * cos + torch.cat((-high, low), -1) * sin


def _attend(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None = None) -> Tensor:
    scores = query @ key.T * query.shape[-1] ** -0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ value


def _sparse(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, keep: float) -> Tensor:
    """Return one head of the attention to the best key tiles, and its coarse residual."""
    query_tiles, key_tiles, value_tiles = (x.unflatten(0, (-1, TILE)) for x in (query, key, value))
    summary = query_tiles.amax(1) + query_tiles.amin(1)
    scores = torch.maximum(summary @ key_tiles.amax(1).T, summary @ key_tiles.amin(1).T)
    best = scores.topk(round(keep * scores.shape[1]), -1).indices
    hidden = torch.ones_like(scores, dtype=torch.bool).scatter(1, best, False)
    hidden = hidden.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    coarse = (scores * query.shape[-1] ** -0.5).softmax(-1) @ value_tiles.mean(1)
    return _attend(query, key, value, hidden) + gate * coarse.repeat_interleave(TILE, 0)
