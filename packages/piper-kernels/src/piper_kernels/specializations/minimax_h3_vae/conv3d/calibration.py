"""Measurement of activation scales.

A scale is the 99.5th percentile of the largest rotated magnitude of a token (the channels of one
voxel), over 127. The tokens above it saturate.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from piper_kernels.specializations.minimax_h3_vae.conv3d.scales import (
    CONVOLUTIONS,
    QUANTILE,
    ActivationScales,
    checked_quantile,
    default_group_size,
    require_module,
)
from piper_kernels.weights.convrot._rotation import rotate_groups
from piper_kernels.weights.convrot.int8._quantization import MIN_SCALE, QUANT_MAX

# Bits of a magnitude that are dropped before it is counted: bins 0.2 % wide.
_DROPPED_BITS = 14
_BINS = 1 << (31 - _DROPPED_BITS)


class TokenMagnitudes:
    """Counts the largest rotated magnitudes of tokens, in memory that does not grow."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    def add(self, input: Tensor, group_size: int) -> None:  # noqa: A002  # as in torch
        """Count the tokens of ``[N, C, T, H, W]``, rotated in groups of channels."""
        for sample in input.detach().to(torch.float32).transpose(0, 1).flatten(2).unbind(1):
            amax = rotate_groups(sample.t(), group_size).abs().amax(-1)
            # The bits of magnitudes are in their order.
            bins = amax.view(torch.int32).clamp_(min=0) >> _DROPPED_BITS
            counts = torch.bincount(bins, minlength=_BINS)
            self._counts = counts if self._counts is None else self._counts + counts

    def quantile(self, quantile: float) -> float:
        """Return the magnitude that the given part of the tokens does not pass, up to 0.2 %.

        Raises:
            ValueError: No token was counted, or the magnitude is not finite.
        """
        if self._counts is None or not int(self._counts.sum()):
            raise ValueError("no token was counted")
        totals = self._counts.cumsum(0)
        wanted = math.ceil(quantile * int(totals[-1]))
        index = int(torch.searchsorted(totals, wanted))
        edges = torch.tensor([index, index + 1], dtype=torch.int32) << _DROPPED_BITS
        low, high = edges.view(torch.float32).tolist()
        if not math.isfinite(high):
            raise ValueError("the activations have values that are not finite")
        return 0.5 * (low + high) if index else 0.0


def calibrate_activation_scales(
    model: nn.Module,
    batches: Iterable[object],
    *,
    names: Sequence[str] | None = None,
    quantile: float = QUANTILE,
    group_size: Callable[[int], int] | None = None,
    run: Callable[[nn.Module, object], object] | None = None,
) -> ActivationScales:
    """Measure the activation scales of convolutions while a model runs.

    Args:
        model: The model with its ordinary convolutions.
        batches: Inputs that stand for what the model will see.
        names: Names of the convolutions in ``model.named_modules()``; ``CONVOLUTIONS`` when
            omitted. Their first argument is ``[N, C, T, H, W]``.
        quantile: Part of the tokens that does not saturate.
        group_size: Rotation group by input channels; ``default_group_size`` when omitted.
        run: Runs the model on a batch; ``model(batch)`` when omitted.

    Returns:
        A scale for each name.

    Raises:
        KeyError: The model has no module of a name.
        ValueError: The quantile is not in (0, 1], or a convolution saw no finite input.
    """
    quantile = checked_quantile(quantile)
    modules = dict(model.named_modules())
    groups = group_size or default_group_size
    counters = {name: TokenMagnitudes() for name in (CONVOLUTIONS if names is None else names)}
    hooks = []
    try:
        for name, counter in counters.items():

            def count(
                _module: nn.Module, inputs: tuple, counter: TokenMagnitudes = counter
            ) -> None:
                counter.add(inputs[0], groups(inputs[0].shape[1]))

            hooks.append(require_module(modules, name).register_forward_pre_hook(count))
        with torch.no_grad():
            for batch in batches:
                if run is None:
                    model(batch)
                else:
                    run(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return ActivationScales(
        {name: _scale(name, counter, quantile) for name, counter in counters.items()},
        quantile=quantile,
    )


def _scale(name: str, counter: TokenMagnitudes, quantile: float) -> float:
    try:
        return max(counter.quantile(quantile) / QUANT_MAX, MIN_SCALE)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; run batches that reach it") from error
