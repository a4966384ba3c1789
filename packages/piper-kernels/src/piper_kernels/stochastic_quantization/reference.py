"""Portable stochastic rounding with a seeded generator.

For a value between two adjacent codes the upper one is taken with a probability equal to
the relative distance from the lower one, so the expected result is the value itself.
"""

import torch
from torch import Tensor


def stochastic_round_to_int(
    values: Tensor,
    *,
    seed: int,
    quant_min: int,
    quant_max: int,
    deterministic: Tensor,
) -> Tensor:
    """Round to one of the two adjacent integers, unbiased in expectation.

    Exact integers, values at or outside the range, NaN and infinities are never
    perturbed: they take the value of ``deterministic``. One uniform number is drawn for
    every element from a fresh generator; the global generator is not consumed.

    Args:
        values: Floating tensor of any shape, in units of the quantization step.
        seed: Seed of the draw. Torch's CPU generator uses its low 32 bits only.
        quant_min: Smallest code.
        quant_max: Largest code.
        deterministic: Codes for elements that are not rounded, same shape as ``values``.

    Returns:
        int64 codes with the shape of ``values``.

    Raises:
        ValueError: The shapes differ.
    """
    _require_same_shape(values, deterministic)
    draw = _uniform(values, values.device, seed)
    finite = torch.isfinite(values)
    bounded = values.to(torch.float32).nan_to_num(0.0, quant_max, quant_min)
    bounded = bounded.clamp(quant_min, quant_max)
    lower = bounded.floor()
    probability = bounded - lower
    rounded = (lower + (draw < probability)).to(torch.int64)
    interior = finite & (bounded > quant_min) & (bounded < quant_max) & (probability > 0)
    return torch.where(interior, rounded, deterministic.to(torch.int64))


def stochastic_codebook_indices(
    values: Tensor,
    codebook: Tensor,
    *,
    seed: int,
    deterministic: Tensor,
) -> Tensor:
    """Choose one of the two adjacent entries of a codebook, unbiased in expectation.

    Exact hits, values at or outside the finite range of the codebook, NaN and infinities
    take the index of ``deterministic``. Reads the codebook's contents: this is a
    conversion helper, not an inference operator.

    Args:
        values: Floating tensor of any shape.
        codebook: 1-D levels in storage order; non-finite entries are ignored.
        seed: Seed of the draw. Torch's CPU generator uses its low 32 bits only.
        deterministic: Indices for elements that are not rounded, same shape as ``values``.

    Returns:
        int64 indices into ``codebook`` with the shape of ``values``.

    Raises:
        ValueError: The shapes differ, or the codebook is not 1-D, has fewer than two
            entries or no finite entry.
    """
    _require_same_shape(values, deterministic)
    if codebook.ndim != 1 or codebook.numel() < 2:
        raise ValueError(
            f"codebook must be 1-D with at least 2 entries, got shape {tuple(codebook.shape)}"
        )
    levels = codebook.to(torch.float32)
    storage = torch.isfinite(levels).nonzero().flatten()
    if storage.numel() == 0:
        raise ValueError("codebook must have at least one finite entry")
    levels, order = torch.sort(levels[storage])
    storage = storage[order]

    device = codebook.device
    lowest, highest = levels[0], levels[-1]
    source = values.to(device=device, dtype=torch.float32)
    finite = torch.isfinite(source)
    # Explicit selection, as nan_to_num would need the bounds on the host.
    bounded = torch.where(torch.isnan(source), 0.0, source).clamp(lowest, highest)
    upper = torch.searchsorted(levels, bounded)
    exact = levels[upper] == bounded
    lower = torch.where(exact, upper, (upper - 1).clamp_min(0))
    width = levels[upper] - levels[lower]
    probability = torch.where(width > 0, (bounded - levels[lower]) / width, 0.0)
    draw = _uniform(values, device, seed)
    chosen = torch.where(draw < probability, storage[upper], storage[lower])
    interior = finite & (bounded > lowest) & (bounded < highest) & ~exact
    return torch.where(interior, chosen, deterministic.to(device=device, dtype=torch.int64))


def _require_same_shape(values: Tensor, deterministic: Tensor) -> None:
    if deterministic.shape != values.shape:
        raise ValueError(
            f"deterministic must have the shape of values {tuple(values.shape)}, "
            f"got {tuple(deterministic.shape)}"
        )


def _uniform(values: Tensor, device: torch.device, seed: int) -> Tensor:
    """Draw FP32 ``[0, 1)`` for every element with the generator of the values' device."""
    generator = torch.Generator(device=values.device).manual_seed(seed)
    draw = torch.rand(values.shape, dtype=torch.float32, device=values.device, generator=generator)
    return draw.to(device)
