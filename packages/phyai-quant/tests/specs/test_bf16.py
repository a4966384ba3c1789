import pytest
import torch

from phyai_quant import QuantConfigError
from phyai_quant.specs.base import AllocationRequest, PhysicalSignature
from phyai_quant.specs.bf16 import Bf16Spec

SHAPES = [(1, 1), (7, 5), (31, 33)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_round_trip_casts_once(make_layer, shape, dtype, source):
    layer, spec = make_layer(), Bf16Spec()
    spec.allocate(layer, AllocationRequest(shape, dtype))
    assert layer.weight.dtype == dtype
    assert not layer.weight.requires_grad
    loaded = torch.randn(shape).to(source)
    spec.load_weight(layer, "weight", loaded)
    spec.process_after_loading(layer)
    spec.process_after_loading(layer)
    assert torch.equal(spec.dequantize_weight(layer), loaded.to(dtype).float())
    assert spec.missing_parts(layer) == []


def test_legs_fill_their_rows_in_any_order(make_layer):
    layer, spec = make_layer("a.qkv_proj"), Bf16Spec()
    spec.allocate(layer, AllocationRequest((9, 3), torch.float32, (4, 2, 3), ("q", "k", "v")))
    layer.weight.fill_(torch.nan)
    full = torch.randn(3, 9).t()  # strided source
    spec.load_weight(layer, "weight", full[6:9], "v")
    assert spec.missing_parts(layer) == ["a.qkv_proj.weight[q]", "a.qkv_proj.weight[k]"]
    spec.load_weight(layer, "weight", full[0:4], "q")
    spec.load_weight(layer, "weight", full[4:6], "k")
    assert torch.equal(layer.weight, full)
    assert spec.missing_parts(layer) == []
    assert layer.logical_widths == (4, 2, 3)


def test_a_fused_tensor_fills_all_legs(make_layer):
    layer, spec = make_layer("a.qkv_proj"), Bf16Spec()
    spec.allocate(layer, AllocationRequest((5, 3), torch.float32, (2, 3), (0, 1)))
    full = torch.randn(5, 3)
    spec.load_weight(layer, "weight", full)
    assert torch.equal(layer.weight, full)
    assert spec.missing_parts(layer) == []


@pytest.mark.parametrize(
    ("name", "loaded", "shard", "text"),
    [
        (
            "weight_scale",
            torch.zeros(1),
            0,
            "cannot use checkpoint tensor 'weight_scale'.*: weight",
        ),
        ("weight", torch.zeros(2, 4), 0, r"shape \[2, 4\], the layer expects \[2, 3\]"),
        ("weight", torch.zeros(2, 3), 1, r"shape \[2, 3\], the layer expects \[3, 3\]"),
        ("weight", torch.zeros(6), 0, r"shape \[6\], the layer expects \[2, 3\]"),
        ("weight", torch.zeros(2, 3), "q", "unknown leg 'q'; allowed: 0, 1"),
        ("weight", torch.zeros(2, 3, dtype=torch.int8), 0, "checkpoint weight is torch.int8"),
        ("weight", torch.zeros(2, 3).to(torch.float8_e4m3fn), 0, "is torch.float8_e4m3fn"),
        ("weight", torch.zeros(2, 3, dtype=torch.float64), 0, "is torch.float64"),
    ],
)
def test_bad_tensors_name_the_layer(make_layer, name, loaded, shard, text):
    layer, spec = make_layer("a.gate_up_proj"), Bf16Spec()
    spec.allocate(layer, AllocationRequest((5, 3), torch.float32, (2, 3), (0, 1)))
    with pytest.raises(QuantConfigError, match=rf"a\.gate_up_proj: .*{text}"):
        spec.load_weight(layer, name, loaded, shard)
    assert len(spec.missing_parts(layer)) == 2


def test_params_dtype_is_closed(make_layer):
    with pytest.raises(QuantConfigError, match=r"down_proj: params_dtype torch\.int8 is not"):
        Bf16Spec().allocate(make_layer(), AllocationRequest((5, 3), torch.int8))


def test_signature_and_names():
    assert Bf16Spec().physical_signature == PhysicalSignature("bf16")
    assert Bf16Spec().tensor_names() == ("weight",)
