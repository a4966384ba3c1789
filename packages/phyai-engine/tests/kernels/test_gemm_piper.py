"""piper-kernels' NVFP4 products: the numbers of the weight format, legs and inputs included."""

import pytest
import torch
from torch import nn

from phyai.dispatch import KernelQuery, Selector
from phyai.dispatch.catalog import build_catalog
from phyai.dispatch.facts import Facts, query_values
from phyai_quant import Granularity, QDType, QuantScheme, TensorQuant, materialize
from phyai_quant.specs.base import AllocationRequest
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

CATALOG = build_catalog()
WIDTHS, COLUMNS = (24, 8, 16), 64


def nvfp4(**changes):
    return TensorQuant(
        QDType.NVFP4, Granularity.BLOCK, micro_scaled=True, block_shape=(1, 16), **changes
    )


def layer_of(rotated, act, *, device="cpu"):
    """Three legs of very different size, so that one global scale cannot serve all."""
    # the engine rounds rotated weights itself; others it reads from a checkpoint
    weight = nvfp4(rotation_group=16) if rotated else nvfp4()
    spec, layer = materialize(QuantScheme(weight, act, online=rotated)), nn.Module()
    request = AllocationRequest(
        (sum(WIDTHS), COLUMNS), torch.float32, WIDTHS, ("q", "k", "v"), device
    )
    spec.allocate(layer, request)
    layer.spec, layer.logical_widths = spec, WIDTHS
    for number, (width, leg) in enumerate(zip(WIDTHS, ("q", "k", "v"), strict=True)):
        generator = torch.Generator().manual_seed(number)
        dense = torch.randn(width, COLUMNS, generator=generator) * 100.0**number
        stored = {"weight": dense}
        if not rotated:
            whole = PiperNVFP4Tensor.from_hp(dense, compute_per_tensor_scale=True)
            stored = {"weight": whole.qdata, "weight_scale": whole.scale}
            stored["weight_scale_2"] = whole.per_tensor_scale
        for name, tensor in stored.items():
            spec.load_weight(layer, name, tensor, leg)
    spec.process_after_loading(layer)
    return layer


def facts_of(layer, dtype="fp32", device="nvidia:sm90"):
    shape = {"M": 3, "N": sum(WIDTHS), "K": COLUMNS}
    dtypes = {"input": dtype, "output": dtype}
    return KernelQuery.build(
        "gemm", dtype=dtypes, quant=layer.spec.physical_signature, shape=shape, device=device
    )


def run(kernel_id, layer, x, bias):
    facts = Facts(query_values(facts_of(layer)))
    return CATALOG.impl(kernel_id).prepare(facts, {})(layer, x, bias)


ROWS = {False: ("piper.gemm.nvfp4_linear", "torch.gemm.nvfp4_linear")}
ROWS[True] = ("piper.gemm.convrot_nvfp4", "torch.gemm.convrot_nvfp4")


def by_leg(out):
    return out.double().split(WIDTHS, dim=-1)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("act", [None, nvfp4(dynamic=True)], ids=["a16", "nvfp4"])
@pytest.mark.parametrize("bias", [None, torch.linspace(-3, 3, sum(WIDTHS))])
def test_products_agree_with_the_reference(rotated, act, bias, relative_error):
    layer = layer_of(rotated, act)
    x = torch.randn(2, 3, COLUMNS, generator=torch.Generator().manual_seed(9))
    actual, expected = (run(name, layer, x, bias) for name in ROWS[rotated])
    assert actual.shape == (2, 3, sum(WIDTHS))
    for one, other in zip(by_leg(actual), by_leg(expected), strict=True):
        assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_legs_are_made_once(dtype, monkeypatch):
    layer = layer_of(False, None)
    row = CATALOG.impl("piper.gemm.nvfp4_linear").prepare(Facts(query_values(facts_of(layer))), {})
    x = torch.randn(4, COLUMNS).to(dtype)
    first = row(layer, x, None)
    made = layer.__dict__["_piper_legs"]
    assert torch.equal(row(layer, x, None), first)
    assert layer.__dict__["_piper_legs"] is made
    assert first.dtype == dtype
    # a layer that moves gets tensors of its new storage
    layer.weight.data = layer.weight.data.clone()
    assert torch.equal(row(layer, x, None), first)
    assert layer.__dict__["_piper_legs"] is not made


@pytest.mark.parametrize("rotated", [False, True])
def test_which_row_is_chosen(rotated):
    layer = layer_of(rotated, None)
    on_gpu, on_cpu = ROWS[rotated]
    for device, chosen in (("nvidia:sm90", on_gpu), ("amd:gfx942", on_gpu), ("cpu", on_cpu)):
        query = facts_of(layer, "bf16", device)
        assert Selector(CATALOG, device=device).explain(query).selected == chosen


@pytest.mark.gpu
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("act", [None, nvfp4(dynamic=True)], ids=["a16", "nvfp4"])
def test_products_on_the_gpu(rotated, act, relative_error):
    layer = layer_of(rotated, act, device="cuda")
    x = torch.randn(2, 3, COLUMNS, generator=torch.Generator().manual_seed(9)).cuda()
    actual, expected = (run(name, layer, x, None) for name in ROWS[rotated])
    for one, other in zip(by_leg(actual), by_leg(expected), strict=True):
        assert relative_error(one, other) < (1e-5 if act is None else 2e-2)
