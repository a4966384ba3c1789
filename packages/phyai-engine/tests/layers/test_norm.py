"""In which dtype norms keep their parameters: what the row that will be chosen reads."""

import pytest
import torch

from phyai.dispatch import (
    KernelConfig,
    initialize_kernel_system,
    kernel_selector_scope,
    live_call_sites,
    reset_kernel_selector,
)
from phyai.dispatch.catalog import build_catalog
from phyai.dispatch.policy_load import policy_from_mapping
from phyai.dispatch.selector import Selector
from phyai.layers import AdaRMSNorm, LayerNorm, RMSNorm

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


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_adding_first_equals_a_separate_sum(dtype):
    torch.manual_seed(0)
    layer = RMSNorm(24, prefix="norm", adds=True)
    layer.weight.data.normal_()
    x, residual = torch.randn(2, 5, 24).to(dtype)
    out, total = layer.add(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, layer(total))
    assert out.dtype == total.dtype == dtype


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_plain_variant_multiplies_by_its_weight(dtype):
    torch.manual_seed(0)
    layer = RMSNorm(24, prefix="norm", variant="rms", eps=1e-3, adds=True)
    layer.weight.data.uniform_(0.5, 1.5)
    x, residual = torch.randn(2, 5, 24).to(dtype)
    wide = (x + residual).double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * layer.weight.double()
    bound = 1e-6 if dtype == FP32 else 2**-8
    torch.testing.assert_close(layer(x + residual).double(), expected, rtol=bound, atol=bound)
    torch.testing.assert_close(layer.add(x, residual)[0].double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("conditions", [1, 5])
def test_adding_behind_a_gate_equals_separate_steps(conditions):
    torch.manual_seed(0)
    layer = AdaRMSNorm(24, 24, prefix="norm")
    x, residual = torch.randn(2, 5, 24)
    gate, modulation = torch.randn(conditions, 24), torch.randn(conditions, 72)
    out, total, next_gate = layer.add(x, residual, gate, modulation)
    torch.testing.assert_close(total, residual + gate * x)
    expected, expected_gate = layer(total, modulation)
    assert torch.equal(out, expected)
    assert torch.equal(next_gate, expected_gate)


@pytest.mark.parametrize("norm", ["plain", "adaptive"])
def test_the_fused_operation_is_asked(norm):
    x = torch.ones(3, 8)
    layer = RMSNorm(8, prefix="norm") if norm == "plain" else AdaRMSNorm(8, 8, prefix="norm")
    if isinstance(layer, RMSNorm):
        layer.add(x, x)
    else:
        layer.add(x, x, x, torch.ones(1, 24))
    sites = [site for site in live_call_sites() if site in vars(layer).values() and not site.cold]
    assert [(site.op, site.trace().selected) for site in sites] == [
        ("rmsnorm_add", "torch.rmsnorm_add")
        if norm == "plain"
        else ("adarmsnorm_add", "torch.adarmsnorm_add")
    ]


def test_the_row_that_adds_decides_the_dtype_where_a_norm_adds(monkeypatch):
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)
    adds = {"id": "adds", "match": {"op": "rmsnorm_add"}, "restrict_to": "flashinfer.rmsnorm_add"}
    rules = [rule({"restrict_to": "triton.rmsnorm"}), adds]
    initialize_kernel_system(KernelConfig(policy_config={"rules": rules}), device="nvidia:sm90")
    dtypes = [
        RMSNorm(64, prefix="norm", adds=adds, activation_dtype=BF16, device="meta").weight.dtype
        for adds in (False, True)
    ]
    assert dtypes == [FP32, BF16]
