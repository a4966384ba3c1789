"""NVFP4 weights of both classes in every layout."""

import itertools

import pytest
import torch

from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
from piper_kernels.weights.nvfp4._layout import swap_packed_pairs

FORMATS = {
    f"{name}-{'swizzled' if swizzled else 'plain'}-{'two' if two_level else 'one'}_level"
    f"{'-high_first' if high_first else ''}": (name, swizzled, two_level, high_first)
    for name, swizzled, two_level, high_first in itertools.product(
        ("nvfp4", "convrot"), (False, True), (False, True), (False, True)
    )
}


def make_nvfp4(
    rows=7,
    features=64,
    dtype=torch.float32,
    *,
    name="nvfp4",
    swizzled=False,
    two_level=True,
    high_first=False,
    **options,
):
    generator = torch.Generator().manual_seed(rows * 1000 + features)
    dense = torch.randn(rows, features, generator=generator).to(dtype)
    cls = PiperNVFP4Tensor
    if name == "convrot":
        cls, options = ConvRotNVFP4Tensor, {"group_size": 16, **options}
    weight = cls.from_hp(
        dense, is_swizzled_scales=swizzled, compute_per_tensor_scale=two_level, **options
    )
    if high_first:
        weight.qdata = swap_packed_pairs(weight.qdata)
        weight.high_first = True
    return weight


@pytest.fixture(params=FORMATS)
def make_weight(request):
    name, swizzled, two_level, high_first = FORMATS[request.param]

    def make(rows=7, features=64, dtype=torch.float32, **options):
        return make_nvfp4(
            rows,
            features,
            dtype,
            name=name,
            swizzled=swizzled,
            two_level=two_level,
            high_first=high_first,
            **options,
        )

    return make


@pytest.fixture
def weight(make_weight):
    return make_weight()


@pytest.fixture
def plain():
    return make_nvfp4
