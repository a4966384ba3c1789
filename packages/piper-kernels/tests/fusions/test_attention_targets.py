"""Which targets execute fusions with attention in kernels."""

import pytest
import torch

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.attention.sparse_piper_attention import _hopper, _mixed_sign
from piper_kernels.fusions.attention import targets

pytest.importorskip("triton", reason="Triton is not installed")

CUDA = torch.device("cuda")
NATIVE = ("sm_80", "sm_89", "sm_90", "sm_120", "gfx1200", "gfx1201")
OTHER = ("sm_75", "sm_100", "gfx942")


@pytest.fixture
def on(monkeypatch):
    def select(name):
        target = AcceleratorTarget("hip" if name.startswith("gfx") else "cuda", name)
        for module in (_hopper, _mixed_sign, targets):
            monkeypatch.setattr(module, "accelerator_target", lambda _device: target)

    return select


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_targets_with_kernels(on, name, head_dim):
    on(name)
    assert targets.supports_sparse_attention(CUDA, head_dim) == (True, "")
    assert targets.supports_int8_projections(CUDA) == (True, "")
    for is_causal in (False, True):
        assert targets.supports_dense_attention(CUDA, head_dim, is_causal) == (True, "")


@pytest.mark.parametrize("name", OTHER)
def test_targets_without_kernels_say_why(on, name):
    on(name)
    for usable, reason in (
        targets.supports_sparse_attention(CUDA, 64),
        targets.supports_dense_attention(CUDA, 64, False),
    ):
        assert not usable
        assert reason


def test_no_accelerator():
    device = torch.device("cpu")
    for usable, reason in (
        targets.supports_sparse_attention(device, 64),
        targets.supports_dense_attention(device, 64, True),
        targets.supports_int8_projections(device),
        targets.supports_nvfp4_projections(device),
    ):
        assert not usable
        assert reason
