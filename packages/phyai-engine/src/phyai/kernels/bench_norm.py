"""Inputs of measurements: adaptive norms and channel norms."""

from typing import Any

import torch

from phyai.dispatch.bench_inputs import BenchInputs
from phyai.dispatch.facts import Facts
from phyai.kernels.bench import DTYPES, random_tensor

_EPS = 1e-6
_POSITIONS = (64, 64)


def adarmsnorm_inputs(facts: Facts, device: Any) -> tuple[Any, ...]:
    """Returns ``(x, modulation, eps)`` with one modulation for all tokens."""
    tokens, hidden = facts["shape.tokens"], facts["shape.hidden"]
    x = random_tensor((tokens, hidden), facts["dtype.input"], device)
    return x, random_tensor((1, 3 * hidden), facts["dtype.modulation"], device), _EPS


def channel_l2_norm_inputs(facts: Facts, device: Any) -> BenchInputs:
    """Returns the arguments for one map of 64 x 64 positions; facts state the channels alone."""
    channels = facts["shape.channels"]
    first = facts["attrs.channel_first"] is True
    shape = (1, channels, *_POSITIONS) if first else (1, *_POSITIONS, channels)
    bias = None
    if facts["attrs.bias"] is True:
        bias = random_tensor((channels,), facts["dtype.bias"], device)
    x = random_tensor(shape, facts["dtype.input"], device)
    weight = random_tensor((channels,), facts["dtype.weight"], device)
    compute: torch.dtype = DTYPES[facts["dtype.compute"]]
    return BenchInputs((x, weight, bias, _EPS), {"channel_first": first, "compute_dtype": compute})
