"""Gated products: which row runs, how a policy changes that, and what layers hand over."""

import sys

import pytest
import torch
from torch.nn import functional

from phyai.dispatch import Selector, kernel_selector_scope, policy_from_mapping
from phyai.dispatch.catalog import build_catalog
from phyai.layers import GatedMLP, Leg, Linear
from phyai.layers.mlp import Activation

from .product_choice import ask

PREFERENCE = {
    "rules": [
        {"id": "fused", "match": {"op": "gated_product"}, "prefer": "triton.gated_product"},
    ]
}
QUERY = {"M": 968, "K": 2048, "hidden": 16384}


@pytest.fixture(autouse=True)
def _with_libraries(monkeypatch):
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)


def question(policy=None, *, kind="silu", **changes):
    return ask("gated_product", QUERY, policy, kind=kind, **changes)


def chosen(*policy, **changes):
    selector, query = question(*policy, **changes)
    return selector.explain(query)


def test_the_layers_run_until_a_policy_prefers_the_fused_row():
    assert chosen().selected == "layers.gated_product"
    assert chosen(PREFERENCE).selected == "triton.gated_product"
    assert chosen(PREFERENCE, kind="gelu_tanh").selected == "triton.gated_product"


@pytest.mark.parametrize(
    "changes",
    [
        {"M": 255},
        {"K": 2080},
        {"hidden": 16448},
        {"input": "fp16"},
        {"weight": "fp32"},
        {"format": "int8"},
        {"kind": "gelu"},
        {"device": "nvidia:sm89"},
        {"device": "nvidia:sm100"},
        {"device": "amd:gfx942"},
    ],
)
def test_what_the_fused_row_is_not_for(changes):
    assert chosen(PREFERENCE, **changes).selected == "layers.gated_product"


@pytest.mark.parametrize("changes", [{"M": 256}, {"K": 64}, {"hidden": 128}])
def test_smallest_sizes_of_the_fused_row(changes):
    assert chosen(PREFERENCE, **changes).selected == "triton.gated_product"


def test_a_triton_without_gluon_leaves_the_choice_to_the_layers(monkeypatch):
    monkeypatch.setitem(sys.modules, "phyai.triton.gated_product", None)
    selector, query = question(PREFERENCE)
    trace = selector.select(query).trace
    assert trace.selected == "layers.gated_product"
    (row,) = [row for row in trace.candidates if row.kernel_id == "triton.gated_product"]
    assert row.eligible
    assert "phyai.triton.gated_product" in row.prepare_error


def make_mlp(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    mlp = GatedMLP(8, 12, prefix="a.mlp", role="prefix", params_dtype=dtype, device="cpu")
    for linear in (mlp.gate_up_proj, mlp.down_proj):
        linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator))
    return mlp


@torch.inference_mode()
def test_layers_ask_for_the_product_and_its_parts(monkeypatch):
    mlp, x = make_mlp(), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    gate, up = (x @ mlp.gate_up_proj.weight.T).chunk(2, dim=-1)
    wanted = (functional.gelu(gate, approximate="tanh") * up) @ mlp.down_proj.weight.T
    with kernel_selector_scope(Selector(build_catalog(), device="cpu")):
        assert (mlp(x) - wanted).abs().max() < 1e-5
        site = mlp.gate_up_proj._gated_site
        (trace,) = site.traces()
        assert (site.op, site.role, trace.selected) == (
            "gated_product",
            "prefix",
            "layers.gated_product",
        )
        facts = trace.as_dict()["facts"]
        assert {name: facts[f"shape.{name}"] for name in ("M", "K", "hidden")} == {
            "M": 10, "K": 8, "hidden": 12,
        }  # fmt: skip
        assert facts["attrs.activation"] == "gelu_tanh"
        # The parts stay calls of their own.
        assert mlp.gate_up_proj._site.trace().selected == "torch.gemm.bf16"
        assert mlp.activation._site.trace().selected == "torch.activation.gelu_tanh_and_mul"


@torch.inference_mode()
def test_the_fused_row_gets_input_weight_and_activation(monkeypatch):
    from types import ModuleType

    calls = []

    def stand_in(x, weight, kind):
        calls.append((x.shape, weight.shape, kind))
        return x.new_full((*x.shape[:-1], weight.shape[0] // 2), 7.0)

    module = ModuleType("phyai.triton.gated_product")
    module.gated_product = stand_in
    monkeypatch.setitem(sys.modules, "phyai.triton.gated_product", module)
    catalog = build_catalog()
    run = catalog.impl("triton.gated_product").prepare({"attrs.activation": "silu"}, {})
    legs = (Leg("gate_proj", 128, 0), Leg("up_proj", 128, 1))
    linear = Linear(64, legs, params_dtype=torch.bfloat16)
    out = run(linear, Activation("silu", gated=True, width=128), torch.zeros(3, 64).bfloat16())
    assert calls == [(torch.Size([3, 64]), torch.Size([256, 64]), "silu")]
    assert out.shape == (3, 128)
    assert out.eq(7).all()


@torch.inference_mode()
@pytest.mark.parametrize(("gated", "bias"), [(False, False), (False, True), (True, True)])
def test_other_activations_and_biases_are_calls_of_their_own(gated, bias):
    linear = Linear(4, 6, bias=bias)
    linear.weight.copy_(torch.randn(6, 4, generator=torch.Generator().manual_seed(2)))
    if linear.bias is not None:
        linear.bias.copy_(torch.arange(6.0))
    activation = Activation("silu", gated=gated, width=3 if gated else 6)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    with kernel_selector_scope(Selector(build_catalog(), device="cpu")):
        assert torch.equal(linear.activated(x, activation), activation(linear(x)))
    assert "_gated_site" not in vars(linear)


@pytest.mark.gpu
@torch.inference_mode()
def test_both_rows_agree_on_a_gpu(monkeypatch):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.undo()
    mlp = GatedMLP(
        320, 384, prefix="a.mlp", role="prefix", params_dtype=torch.bfloat16, device="cuda"
    )
    for linear in (mlp.gate_up_proj, mlp.down_proj):
        linear.weight.normal_(std=linear.in_features**-0.5)
    x, catalog, found = torch.randn(2, 173, 320, device="cuda").bfloat16(), build_catalog(), {}
    # Rows that compile in a moment.
    others = [
        {"id": "activation", "match": {"op": "activation"}, "prefer": "triton.activation"},
        {"id": "product", "match": {"op": "gemm"}, "prefer": "torch.gemm.bf16"},
    ]
    for name, rules in (("layers", others), ("triton", [*others, *PREFERENCE["rules"]])):
        policy = policy_from_mapping({"rules": rules}, catalog=catalog)
        with kernel_selector_scope(Selector(catalog, policy=policy, device="cuda")):
            found[name] = mlp(x).float()
            assert mlp.gate_up_proj._gated_site.trace().selected == f"{name}.gated_product"
    assert (found["layers"] - found["triton"]).norm() < 1e-2 * found["layers"].norm()
