"""When the engine's own bf16 product for Hopper runs, and what it is given."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from phyai.dispatch import KernelQuery, Selector, policy_from_mapping
from phyai.dispatch.catalog import build_catalog

ROW = "triton.gemm.hopper"
PREFERENCE = {"rules": [{"id": "own", "match": {"op": "gemm", "role": "vision"}, "prefer": ROW}]}


def chosen(policy=None, *, device="nvidia:sm90", format="bf16", **changes):  # noqa: A002
    dtype = {"input": "bf16", "output": "bf16", "weight": "bf16"}
    dims = {"M": 768, "N": 1152, "K": 4304}
    for name, value in changes.items():
        (dtype if name in dtype else dims)[name] = value
    catalog = build_catalog()
    rules = {"policy": policy_from_mapping(policy, catalog=catalog)} if policy else {}
    query = KernelQuery.build(
        "gemm",
        role="vision",
        device=device,
        dtype=dtype,
        quant={"format": format},
        shape=dims,
    )
    return Selector(catalog, device=device, **rules).explain(query).selected


@pytest.mark.parametrize("missing", [(), ("flashinfer", "humming", "piper_kernels")])
def test_only_a_policy_brings_it_before_cublas(monkeypatch, missing):
    absent = dict.fromkeys(missing, "absent")
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", absent.get)
    assert chosen() != ROW
    assert chosen(PREFERENCE) == ROW


@pytest.mark.parametrize(
    "changes",
    [
        {"M": 255},
        {"N": 1160},
        {"K": 4300},
        {"input": "fp16"},
        {"output": "fp32"},
        {"weight": "fp32"},
        {"format": "int8"},
        {"device": "nvidia:sm100"},
        {"device": "amd:gfx942"},
    ],
)
def test_what_it_is_not_for(monkeypatch, changes):
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)
    assert chosen(PREFERENCE, **changes) != ROW


def test_what_the_product_is_given(monkeypatch):
    calls = []
    module = ModuleType("phyai.triton.hopper_gemm")
    module.hopper_gemm = lambda *args: calls.append(args) or "product"
    monkeypatch.setitem(sys.modules, "phyai.triton.hopper_gemm", module)
    run = build_catalog().impl(ROW).prepare({}, {})
    x, weight, bias = torch.zeros(3, 8), torch.zeros(16, 8), torch.zeros(16)
    assert run(SimpleNamespace(weight=weight), x, bias) == "product"
    assert calls == [(x, weight, bias)]
