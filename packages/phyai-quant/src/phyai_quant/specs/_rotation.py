"""The rotation along K that ConvRot formats share."""

import torch
from torch import nn

from phyai_quant.scheme import ROTATION_GROUPS, QuantConfigError
from phyai_quant.specs import loading
from phyai_quant.specs.slicing import check_slices


def check_rotation(layer: nn.Module, group: int) -> None:
    """Raises QuantConfigError when rotation groups do not cover K, or a slice cuts one of them."""
    request = loading.load_state(layer).request
    for size in (request.weight_shape[1], *(part.full_shape[1] for part in request.slices)):
        if size % group:
            raise QuantConfigError(
                f"{loading.layer_name(layer)}: K = {size} is not divisible by rotation_group "
                f"{group}; allowed groups: {', '.join(map(str, ROTATION_GROUPS))}; choose one that "
                "divides K, use a degree of tensor parallelism that keeps groups whole, or keep "
                "the layer unquantized"
            )
    check_slices(layer, "rotation group", columns_per_entry=group)


def rotate(values: torch.Tensor, group: int) -> torch.Tensor:
    """Returns fp32 ``[..., K]`` with every group of K multiplied by the regular Hadamard matrix.

    The matrix of 4^n is the n-fold Kronecker product of the one of 4, whose row i is all ones but
    for -1 in column 3 - i, over ``sqrt(group)``. It is its own inverse. Written as additions, it
    stays in fp32 whatever precision matrix products have.

    Args:
        values: ``[..., K]``, K a multiple of ``group``.
        group: 16, 64 or 256.
    """
    factors = ROTATION_GROUPS.index(group) + 2
    split = values.float().unflatten(-1, (-1, *[4] * factors))
    for axis in range(-factors, 0):
        split = split.sum(axis, keepdim=True) - 2 * split.flip(axis)
    return split.flatten(-factors - 1) * group**-0.5
