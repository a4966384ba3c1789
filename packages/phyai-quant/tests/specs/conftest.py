from collections.abc import Callable

import pytest
import torch
from torch import nn

from phyai_quant.specs.base import AllocationRequest


@pytest.fixture
def allocated(make_layer: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Returns what makes a layer and allocates its weight."""

    def allocate(spec, shape, widths=(), ids=(None,), prefix="a.down_proj"):
        layer = make_layer(prefix)
        spec.allocate(layer, AllocationRequest(shape, torch.bfloat16, widths, ids))
        return layer

    return allocate
