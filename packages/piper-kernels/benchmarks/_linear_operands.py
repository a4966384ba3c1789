"""Random operands of the measured linears and their exact results."""

from dataclasses import dataclass

import torch
from _graph_timing import Variant
from _harness import device
from _linear_cases import LinearCase
from _linear_providers import PROVIDERS
from torch import Tensor
from torch.nn import functional

from piper_kernels._input_activations import apply_activation

CHECKED_ROWS = 256
OUTLIER_EVERY, OUTLIER_FACTOR = 256, 8


@dataclass(frozen=True)
class Operands:
    """Random operands of a case: bf16 inputs of which every 256th feature is 8 times larger."""

    inputs: list[Tensor]
    weight: Tensor
    bias: Tensor | None


def make_operands(case: LinearCase, most: int | None = None) -> Operands:
    """Return as many inputs as the provider with the smallest weights rotates through.

    Args:
        case: The shapes.
        most: A limit of the number.
    """
    generator = torch.Generator(device()).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device())

    bits = min(PROVIDERS[name].weight_bits for name in case.providers)
    count = case.sets(bits) if most is None else most
    inputs = [random(case.m, case.input_features) for _ in range(count)]
    for x in inputs:
        x[:, ::OUTLIER_EVERY] *= OUTLIER_FACTOR
    return Operands(inputs, random(case.n, case.k), random(case.n) if case.bias else None)


def exact_rows(case: LinearCase, operands: Operands) -> Tensor:
    """Return the first rows of the exact result in FP64."""
    x = apply_activation(operands.inputs[0][:CHECKED_ROWS], case.activation).double()
    bias = None if operands.bias is None else operands.bias.double()
    return functional.linear(x, operands.weight.double(), bias)


def copy_variant(case: LinearCase) -> Variant:
    """Return a device copy with the traffic of an INT8 preparation."""
    sets = case.sets(8)
    size = max(1, case.preparation_bytes // 2)
    source = torch.empty((sets, size), dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return Variant(lambda index: target[index].copy_(source[index]), sets)
