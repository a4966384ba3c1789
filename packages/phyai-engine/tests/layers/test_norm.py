"""In which dtype norms keep their parameters: what the row that will be chosen reads."""

import pytest
import torch

from phyai.dispatch import (
    KernelConfig,
    initialize_kernel_system,
    kernel_selector_scope,
    reset_kernel_selector,
)
from phyai.dispatch.catalog import build_catalog
from phyai.dispatch.policy_load import policy_from_mapping
from phyai.dispatch.selector import Selector
from phyai.layers import LayerNorm, RMSNorm

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _fresh_selector():
    yield
    reset_kernel_selector()


@pytest.fixture
def weight_on_gpu(monkeypatch):
    """The dtype that an RMS norm's weight gets on an NVIDIA GPU with every library."""
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)

    def dtype(*rules, width=64, activation=BF16, overrides=()):
        config = {"rules": list(rules), "overrides": list(overrides)}
        initialize_kernel_system(KernelConfig(policy_config=config), device="nvidia:sm90")
        norm = RMSNorm(width, prefix="norm", activation_dtype=activation, device="meta")
        return norm.weight.dtype

    return dtype


def rule(target, **fields):
    return {"id": "mine", "match": {"op": "rmsnorm", **fields}, **target}


def test_the_best_row_decides(weight_on_gpu):
    assert weight_on_gpu() == BF16
    assert weight_on_gpu(activation=FP32) == FP32
    # FlashInfer has no kernel for this width, and the others read any dtype
    assert weight_on_gpu(width=12) == FP32


@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        ({"restrict_to": "triton.rmsnorm"}, FP32),
        ({"restrict_to": "torch.*"}, FP32),
        ({"prefer": ["triton.rmsnorm", "flashinfer.rmsnorm"]}, FP32),
        ({"prefer": ["flashinfer.rmsnorm", "triton.rmsnorm"]}, BF16),
        ({"prefer": "flashinfer.rmsnorm"}, BF16),
    ],
)
def test_the_policy_decides(weight_on_gpu, target, dtype):
    assert weight_on_gpu(rule(target)) == dtype


def test_rules_for_other_calls_do_not_decide(weight_on_gpu):
    target = {"restrict_to": "torch.*"}
    assert weight_on_gpu(rule(target, role="other")) == BF16
    assert weight_on_gpu(rule(target, **{"dtype.input": "fp16"})) == BF16
    assert weight_on_gpu(rule(target, role="norm", **{"shape.hidden": 64})) == FP32


def test_an_override_decides(weight_on_gpu):
    pin = {"id": "pin", "match": {"op": "rmsnorm"}, "use": "triton.rmsnorm"}
    assert weight_on_gpu(overrides=[pin]) == FP32


@pytest.mark.parametrize("build", [RMSNorm, LayerNorm])
def test_parameters_stay_wide_on_the_cpu(build):
    layer = build(64, prefix="norm", activation_dtype=BF16)
    assert {parameter.dtype for parameter in layer.parameters()} == {FP32}


def test_a_rounded_weight_changes_results_by_rounding_only():
    """A bf16 weight moves a bf16 output by at most about one rounding step."""
    torch.manual_seed(0)
    layer = RMSNorm(256, prefix="norm", activation_dtype=BF16)
    layer.weight.data.normal_(std=0.3)
    x = torch.randn(64, 256).to(BF16)
    wide = layer(x)
    layer.weight.data = layer.weight.data.to(BF16)
    rounded = layer(x)
    torch.testing.assert_close(rounded, wide, rtol=2**-7, atol=2**-8)


def test_a_policy_is_asked_for_the_device_of_the_layer():
    catalog = build_catalog()
    policy = policy_from_mapping({"rules": []}, catalog=catalog)
    with kernel_selector_scope(Selector(catalog, policy, device="nvidia:sm90")):
        assert RMSNorm(64, prefix="norm", activation_dtype=BF16).weight.dtype == FP32
