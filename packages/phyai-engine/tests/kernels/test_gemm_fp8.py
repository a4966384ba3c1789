"""Products of FP8 rows: what is passed on, which row is chosen, and numbers on a GPU."""

import pytest
import torch
from torch import nn

from phyai.dispatch import CallSite, KernelQuery, PolicyError, Selector, policy_from_mapping
from phyai.dispatch.catalog import build_catalog
from phyai.kernels import gemm_fp8
from phyai_quant import QuantScheme, TensorQuant, materialize
from phyai_quant.specs.base import AllocationRequest

SCHEME = QuantScheme(
    TensorQuant("fp8_e4m3", "per_channel"),
    TensorQuant("fp8_e4m3", "per_channel", dynamic=True),
    online=True,
    stored_by="fp8_rows",
)


def make_layer(n, k, device="cpu"):
    layer, spec = nn.Module(), materialize(SCHEME)
    layer.spec = spec
    spec.allocate(layer, AllocationRequest((n, k), torch.bfloat16, device=device))
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0)).to(device)
    spec.load_weight(layer, "weight", weight)
    spec.process_after_loading(layer)
    return layer


def quantize(x):
    rows = x.reshape(-1, x.shape[-1]).float()
    scales = (rows.abs().amax(1) / 448).clamp_min(1e-12)
    return (rows / scales[:, None]).to(torch.float8_e4m3fn), scales


@pytest.mark.parametrize("fast", [False, True])
def test_what_the_product_is_given(monkeypatch, row, relative_error, fast):
    def scaled_mm(a, b, *, scale_a, scale_b, bias, out_dtype, use_fast_accum):
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert (scale_a.shape, scale_b.shape) == ((6, 1), (1, 48))
        assert use_fast_accum is fast
        sums = (a.float() * scale_a) @ (b.float() * scale_b)
        assert bias is None or bias.dtype == torch.bfloat16, "cuBLAS takes no other one"
        return (sums if bias is None else sums + bias).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    layer = make_layer(48, 32)
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = torch.randn(48).bfloat16()
    run = gemm_fp8.product(quantize, fast=fast)
    expected = row("torch.gemm.fp8_dequant")(layer, x, bias)
    assert run(layer, x, bias).shape == (2, 3, 48)
    assert relative_error(run(layer, x, bias), expected) < 5e-3
    assert relative_error(run(layer, x, bias.float()), expected) < 5e-3
    assert relative_error(run(layer, x, None), row("torch.gemm.fp8_dequant")(layer, x, None)) < 5e-3
    assert run(layer, x[:0], bias).shape == (0, 3, 48)


def query(layer, **changes):
    quant = layer.spec.physical_signature
    dtype = {"input": "bf16", "output": "bf16", "weight": layer.spec.weight_dtype}
    dims = {"M": 6186, "N": 6144, "K": 4096, **changes}
    return KernelQuery.build(
        "gemm", device="nvidia:sm90", dtype=dtype, quant=quant, dims=dims, role="generation"
    )


def test_the_fused_row_is_chosen_where_it_can_run(monkeypatch):
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)
    layer, catalog = make_layer(16, 16), build_catalog()
    selector = Selector(catalog, device="nvidia:sm90")
    assert selector.explain(query(layer)).selected == "triton.gemm.fp8_rows"
    assert selector.explain(query(layer, N=24)).selected == "torch.gemm.fp8_dequant"
    monkeypatch.setattr(
        "phyai.dispatch.facts.library_problem", lambda name: "absent" if name == "triton" else None
    )
    selector = Selector(catalog, device="nvidia:sm90")
    assert selector.explain(query(layer)).selected == "torch.gemm.fp8_per_channel"
    rule = {"restrict_to": "triton.gemm.fp8_rows", "params": {"fast_accumulation": 1}}
    with pytest.raises(PolicyError, match="fast_accumulation is 1; allowed: true, false"):
        policy_from_mapping({"rules": [rule]}, catalog=catalog)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(1, 4096, 4096), (3093, 4096, 12288), (37, 144, 80)])
def test_products_on_the_gpu(row, relative_error, shape):
    m, n, k = shape
    layer = make_layer(n, k, "cuda")
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    x[0] *= 1e3
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    expected = row("torch.gemm.fp8_dequant")(layer, x, bias)
    found = row("triton.gemm.fp8_rows")(layer, x, bias)
    fast = row("triton.gemm.fp8_rows", {"fast_accumulation": True})(layer, x, bias)
    assert relative_error(found, expected) < 5e-3
    assert relative_error(fast, expected) < 2e-2
    site = CallSite("gemm", role="linear", dims={"N": n, "K": k})
    dtype = {"input": x.dtype, "output": x.dtype, "weight": layer.spec.weight_dtype}
    quant = layer.spec.physical_signature
    chosen = site.select(device=x.device, dtype=dtype, quant=quant, dims={"M": m})
    assert chosen.kernel_id == "triton.gemm.fp8_rows"
