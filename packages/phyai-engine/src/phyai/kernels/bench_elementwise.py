"""Inputs of measurements: activations, rotary embedding, modulation, token embedding."""

from typing import Any

import torch
from torch import Tensor

from phyai.dispatch.facts import Facts
from phyai.kernels.bench import random_tensor

_INTEGERS = {"int32": torch.int32, "int64": torch.int64}
_LARGEST_TABLE = 32768


def activation_inputs(facts: Facts, device: Any) -> tuple[Any, ...]:
    """Returns ``(x,)``: [tokens, hidden], twice as wide when gated."""
    width = facts["shape.hidden"] * (2 if facts["attrs.gated"] else 1)
    return (random_tensor((facts["shape.tokens"], width), facts["dtype.input"], device),)


def rope_inputs(facts: Facts, device: Any) -> tuple[Any, ...]:
    """Returns ``(positions, q, k, cos_sin_cache)`` for positions 0 to tokens - 1."""
    tokens, head_dim = facts["shape.tokens"], facts["shape.head_dim"]
    positions = torch.arange(tokens, device=device)
    q, k = (
        random_tensor((tokens, facts[f"shape.{heads}"], head_dim), facts["dtype.input"], device)
        for heads in ("heads_q", "heads_k")
    )
    angles = random_tensor((tokens, facts["shape.rotary_dim"] // 2), "fp32", device)
    return positions, q, k, torch.cat((angles.cos(), angles.sin()), dim=-1)


def modulate_inputs(facts: Facts, device: Any) -> tuple[Any, ...]:
    """Returns ``(x, scale, shift)``: [batch, tokens, hidden] and one row for each item."""
    batch, tokens, hidden = (facts[f"shape.{name}"] for name in ("batch", "tokens", "hidden"))
    x = random_tensor((batch, tokens, hidden), facts["dtype.input"], device)
    scale = random_tensor((batch, hidden), facts["dtype.scale"], device)
    return x, scale, random_tensor((batch, hidden), facts["dtype.shift"], device)


def embedding_inputs(facts: Facts, device: Any) -> tuple[Any, ...]:
    """Returns ``(input_ids, weight, shard_start, shard_end)``.

    The shard is cut to 32768 rows, far more than any cache holds, so that measuring does not
    double the largest tensor of a model.
    """
    kind = facts["dtype.input"]
    if kind not in _INTEGERS:
        raise NotImplementedError(f"no benchmark ids of dtype {kind!r}; allowed: int32, int64")
    start = facts["attrs.shard_start"]
    rows = min(facts["attrs.shard_end"] - start, _LARGEST_TABLE)
    table = random_tensor((rows, facts["shape.embedding_dim"]), facts["dtype.weight"], device)
    return (
        _ids(facts["shape.tokens"], start, rows, _INTEGERS[kind], device),
        table,
        start,
        (start + rows),
    )


def _ids(count: int, start: int, rows: int, dtype: torch.dtype, device: Any) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(0)
    return torch.randint(
        start, start + rows, (count,), generator=generator, device=device, dtype=dtype
    )
