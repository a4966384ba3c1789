"""Products with a plain activation: which row runs, what it is given, and numbers on a GPU."""

import pytest
import torch
from torch.nn import functional

from phyai.dispatch import Selector, kernel_selector_scope, policy_from_mapping
from phyai.dispatch.catalog import build_catalog
from phyai.layers import Linear, PlainMLP
from phyai.layers.mlp import Activation

from .product_choice import ask

PREFERENCE = {
    "rules": [
        {"id": "fused", "match": {"op": "activated_product"}, "prefer": "torch.activated_product"},
    ]
}


def chosen(policy=None, *, kind="gelu_tanh", **changes):
    sizes = {"M": 768, "K": 1152, "hidden": 4304}
    selector, query = ask("activated_product", sizes, policy, kind=kind, **changes)
    return selector.explain(query).selected


def test_the_layers_run_until_a_policy_prefers_the_fused_row():
    assert chosen() == "layers.activated_product"
    assert chosen(PREFERENCE) == "torch.activated_product"
    half = {"format": "fp16", "input": "fp16", "weight": "fp16"}
    assert chosen(PREFERENCE, **half) == "torch.activated_product"


@pytest.mark.parametrize(
    "changes",
    [
        {"M": 0},
        {"input": "fp16"},
        {"weight": "fp32", "input": "fp32"},
        {"format": "int8"},
        {"kind": "gelu"},
        {"kind": "silu"},
        {"device": "amd:gfx942"},
        {"device": "cpu"},
    ],
)
def test_what_the_fused_row_is_not_for(changes):
    assert chosen(PREFERENCE, **changes) == "layers.activated_product"


@torch.inference_mode()
def test_what_the_fused_row_is_given(monkeypatch):
    """ATen applies the exact GELU on the CPU, so the call is replaced by what a GPU computes."""

    def addmm_activation(bias, rows, weight, *, use_gelu):
        assert use_gelu
        assert rows.dim() == 2
        return functional.gelu(torch.addmm(bias, rows, weight), approximate="tanh")

    monkeypatch.setattr(torch, "_addmm_activation", addmm_activation)
    linear = make(Linear(8, 12, bias=True))
    activation = Activation("gelu_tanh", gated=False, width=12)
    run = build_catalog().impl("torch.activated_product").prepare({}, {})
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    for given in (x, x.transpose(0, 1), x[0]):
        found = run(linear, activation, given)
        assert found.shape == (*given.shape[:-1], 12)
        wanted = functional.linear(given, linear.weight, linear.bias)
        wanted = functional.gelu(wanted, approximate="tanh")
        torch.testing.assert_close(found, wanted)


def make(linear):
    generator = torch.Generator().manual_seed(0)
    linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator))
    linear.bias.copy_(torch.randn(linear.bias.shape, generator=generator))
    return linear


def make_mlp(dtype=torch.float32, device="cpu", width=8, hidden=12):
    mlp = PlainMLP(width, hidden, prefix="a.mlp", role="vision", params_dtype=dtype, device=device)
    for linear in (mlp.fc1, mlp.fc2):
        make(linear)
        linear.weight.mul_(linear.in_features**-0.5)
    return mlp


@torch.inference_mode()
def test_a_plain_block_asks_for_the_product_and_its_parts():
    mlp, x = make_mlp(), torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    hidden = functional.gelu(x @ mlp.fc1.weight.T + mlp.fc1.bias, approximate="tanh")
    with kernel_selector_scope(Selector(build_catalog(), device="cpu")):
        assert (mlp(x) - (hidden @ mlp.fc2.weight.T + mlp.fc2.bias)).abs().max() < 1e-5
        (trace,) = mlp.fc1._activated_site.traces()
        assert (trace.op, trace.selected) == ("activated_product", "layers.activated_product")
        facts = trace.as_dict()["facts"]
        assert [facts[f"shape.{name}"] for name in ("M", "K", "hidden")] == [5, 8, 12]
        assert facts["role"] == "vision"
        # The parts stay calls of their own.
        assert mlp.fc1._site.trace().selected == "torch.gemm.bf16"
        assert mlp.activation._site.trace().selected == "torch.activation.gelu_tanh"


@pytest.mark.gpu
@torch.inference_mode()
def test_both_rows_agree_on_a_gpu(monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.undo()
    mlp = make_mlp(torch.bfloat16, "cuda", 320, 4304)
    x, catalog, found = torch.randn(173, 320, device="cuda").bfloat16(), build_catalog(), {}
    parts = [
        {"id": "activation", "match": {"op": "activation"}, "prefer": "triton.activation"},
        {"id": "product", "match": {"op": "gemm"}, "prefer": "torch.gemm.bf16"},
    ]
    for name, rules in (("layers", parts), ("torch", [*parts, *PREFERENCE["rules"]])):
        policy = policy_from_mapping({"rules": rules}, catalog=catalog)
        with kernel_selector_scope(Selector(catalog, policy=policy, device="cuda")):
            found[name] = mlp(x).float()
            trace = mlp.fc1._activated_site.trace()
            assert trace.selected == f"{name}.activated_product"
    assert (found["layers"] - found["torch"]).norm() < 1e-2 * found["layers"].norm()
