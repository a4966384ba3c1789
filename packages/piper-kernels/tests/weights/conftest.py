"""Weights that the tests of the shared helpers use."""

import pytest
import torch

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor


@pytest.fixture
def make_weight():
    def make(rows=7, features=32, dtype=torch.float32, act=None, group_size=16):
        generator = torch.Generator().manual_seed(rows * 1000 + features)
        dense = torch.randn(rows, features, generator=generator).to(dtype)
        return ConvRotInt8Tensor.from_hp(dense, group_size=group_size, act_per_tensor_scale=act)

    return make


@pytest.fixture
def weight(make_weight):
    return make_weight()
