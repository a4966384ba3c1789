"""Graphs of weights with a static input scale stay out of the disk cache, on every torch."""

import copy
import io

import pytest
import torch
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._subclasses.fake_tensor import FakeTensorMode

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

MAKERS = {
    ConvRotInt8Tensor: {"group_size": 16},
    PiperNVFP4Tensor: {},
    ConvRotNVFP4Tensor: {"group_size": 16},
}


def fake_of(weight):
    return FakeTensorMode(allow_non_fake_inputs=True).from_tensor(weight)


@pytest.mark.parametrize("kind", MAKERS, ids=lambda kind: kind.__name__)
def test_a_static_scale_refuses_both_ways_to_make_a_key(kind):
    weight = kind.from_hp(
        torch.randn(5, 32), act_per_tensor_scale=torch.tensor(0.5), **MAKERS[kind]
    )
    with pytest.raises(BypassAOTAutogradCache, match=kind.__name__):
        weight._stable_hash_for_caching()
    with pytest.raises(BypassAOTAutogradCache, match=kind.__name__):
        fake_of(weight).__reduce_ex__(2)
    torch.save(weight, io.BytesIO())  # a real weight is still pickled
    assert torch.equal(copy.deepcopy(weight).qdata, weight.qdata)


@pytest.mark.parametrize("kind", MAKERS, ids=lambda kind: kind.__name__)
def test_a_dynamic_scale_has_a_key(kind):
    weight = kind.from_hp(torch.randn(5, 32), **MAKERS[kind])
    assert kind.__name__ in weight._stable_hash_for_caching()
    fake_of(weight).__reduce_ex__(2)
