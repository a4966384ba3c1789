"""Queries, keys and values of the attention benchmarks, exact results and how far others are."""

import math
from dataclasses import dataclass

import torch
from _attention_cases import AttentionCase
from _harness import device
from _quality import quality
from _report import HERE
from torch import Tensor

CAPTURED = HERE / "data" / "reach_attention.safetensors"
KINDS = ("normal", "biased values", "outlier keys", "captured")
CHECKED_ROWS = 128
VALUE_BIAS, OUTLIER_EVERY, OUTLIER_FACTOR, OUTLIER_BIAS = 8.0, 32, 4.0, 16.0


@dataclass(frozen=True)
class Operands:
    """bf16 ``query`` ``[B, Hq, S, D]``, ``key`` and ``value`` ``[B, Hkv, S, D]``."""

    query: Tensor
    key: Tensor
    value: Tensor


def random_operands(case: AttentionCase, kind: str = "normal", seed: int = 0) -> Operands:
    """Return N(0, 1) operands, changed as ``kind`` says.

    ``biased values`` adds 8 to every second feature of the values and subtracts it from the
    others. ``outlier keys`` makes every 32nd feature of the keys 4 times larger and adds 16.
    """
    generator = torch.Generator(device()).manual_seed(seed)

    def random(heads: int) -> Tensor:
        shape = (case.batch, heads, case.rows, case.head_dim)
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device())

    query, key, value = random(case.heads), random(case.kv_heads), random(case.kv_heads)
    if kind == "biased values":
        signs = torch.tensor([1.0, -1.0], device=device()).repeat(case.head_dim // 2)
        value += (VALUE_BIAS * signs).bfloat16()
    if kind == "outlier keys":
        outliers = key[..., ::OUTLIER_EVERY]
        outliers *= OUTLIER_FACTOR
        outliers += OUTLIER_BIAS
    return Operands(query, key, value)


def captured_operands() -> Operands:
    """Return what the language model of the reach policy attended to, one layer per sequence."""
    from safetensors.torch import load_file

    stored = load_file(CAPTURED)
    return Operands(*(stored[name].to(device()) for name in ("query", "key", "value")))


def checked_rows(rows: int) -> Tensor:
    """Return the rows that are compared: all, or some that are spread over the sequence."""
    if rows <= 2 * CHECKED_ROWS:
        return torch.arange(rows, device=device())
    return torch.linspace(0, rows - 1, CHECKED_ROWS, device=device()).long()


def exact_rows(operands: Operands, rows: Tensor, *, is_causal: bool) -> Tensor:
    """Return some rows of the attention in FP64, ``[B, Hq, rows, D]``."""
    groups = operands.query.shape[1] // operands.key.shape[1]
    results = []
    for head in range(operands.query.shape[1]):
        query = operands.query[:, head, rows].double()
        key, value = (x[:, head // groups].double() for x in (operands.key, operands.value))
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        if is_causal:
            later = torch.arange(key.shape[1], device=rows.device) > rows[:, None]
            scores = scores.masked_fill(later, -math.inf)
        results.append(scores.softmax(-1) @ value)
    return torch.stack(results, 1)


def attention_quality(actual: Tensor, exact: Tensor) -> dict:
    """Return the distance of ``[B, H, rows, D]`` from the exact result.

    Returns:
        The fields of ``_quality.quality``, ``relative_l1`` and ``worst_head_db``, the least
        signal-to-noise ratio of a head.
    """
    found = quality(actual, exact)
    if found["nonfinite"]:
        return found | {"relative_l1": None, "worst_head_db": None}
    difference = (actual.double() - exact).abs()
    heads = [quality(actual[:, i], exact[:, i])["sqnr_db"] for i in range(exact.shape[1])]
    finite = [value for value in heads if value is not None]
    return found | {
        "relative_l1": float(difference.sum() / exact.abs().sum()),
        "worst_head_db": min(finite) if finite else None,
    }
