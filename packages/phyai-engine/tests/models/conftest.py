"""Rows of FP8 codes on the CPU, for tests of who makes them."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from phyai.dispatch.call import CallSite
from phyai.dispatch.catalog import build_catalog
from phyai.kernels.gemm_fp8 import product
from phyai.triton import fp8_rows

ACTIVATIONS = {
    "silu": functional.silu,
    "relu2": lambda values: functional.relu(values).square(),
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def quantize(values):
    rows = values.reshape(-1, values.shape[-1]).float()
    scales = (rows.abs().amax(1) / 448).clamp_min(1e-12)
    return (rows / scales[:, None]).to(torch.float8_e4m3fn), scales


def activate(x, kind, *, gated):
    function = ACTIVATIONS[kind]
    left, right = x.float().chunk(2, 1) if gated else (x.float(), None)
    found = function(left) if right is None else function(left) * right
    return quantize(found.to(x.dtype))


def norm(x, residual, weight, eps, *, gemma=False):
    total = x if residual is None else x + residual
    wide = functional.rms_norm(total.float(), weight.shape, weight.float() + gemma, eps)
    return *quantize(wide.to(x.dtype)), total


def layer_norm(x, residual, weight, bias, eps):
    total = x if residual is None else x + residual
    wide = functional.layer_norm(total.float(), weight.shape, weight.float(), bias.float(), eps)
    return *quantize(wide.to(x.dtype)), total


@pytest.fixture
def fused(monkeypatch):
    """Lets the row of FP8 rows run on the CPU in plain torch; yields what was rounded by whom."""
    made = []
    functions = {
        "activation_rows": activate,
        "rmsnorm_rows": norm,
        "layernorm_rows": layer_norm,
        "quantize_parts": lambda parts: quantize(torch.cat([*parts]).flatten(1)),
    }
    for name, function in functions.items():
        monkeypatch.setattr(
            fp8_rows, name, lambda *a, f=function, n=name, **k: made.append(n) or f(*a, **k)
        )

    def scaled_mm(a, b, *, scale_a, scale_b, bias, out_dtype, use_fast_accum):
        sums = (a.float() * scale_a) @ (b.float() * scale_b)
        return (sums if bias is None else sums + bias).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)

    def inputs(x):
        made.append("product")
        return quantize(x)

    row = build_catalog().impl("triton.gemm.fp8_rows")
    run = product(inputs, fast=False)
    select = CallSite.select

    class Chosen:
        impl = row
        execute = staticmethod(run)

    def choose(self, **facts):
        quant = facts.get("quant")
        narrow = self.op == "gemm" and quant is not None and quant.format == "fp8_e4m3"
        return Chosen() if narrow else select(self, **facts)

    monkeypatch.setattr(CallSite, "select", choose)
    return made
