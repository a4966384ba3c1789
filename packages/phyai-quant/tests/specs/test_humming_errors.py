import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from phyai_quant import QuantConfigError, QuantScheme, TensorQuant, materialize
from phyai_quant.specs import humming_pack
from phyai_quant.specs.base import AllocationRequest, LegSlice
from phyai_quant.specs.humming import HummingSpec, build


def token(dtype):
    return TensorQuant(dtype, "per_channel", dynamic=True)


def online(dtype, block=None, activation=None):
    granularity = "per_channel" if block is None else "block"
    micro = dtype in ("nvfp4", "mxfp4")
    weight = TensorQuant(dtype, granularity, block_shape=block, micro_scaled=micro)
    return QuantScheme(weight, None if activation is None else token(activation), online=True)


SCHEMES = {
    "w4a16": online("int4", (1, 32)),
    "fp8_e4m3_a16": online("fp8_e4m3"),
    "fp8_e4m3_a8": online("fp8_e4m3", activation="fp8_e4m3"),
    "fp8_e4m3_block_a8": online("fp8_e4m3", (64, 32), "fp8_e4m3"),
    "fp8_e5m2_a8": online("fp8_e5m2", activation="fp8_e5m2"),
    "mxfp4_a16": online("mxfp4", (1, 32)),
    "nvfp4_a16": online("nvfp4", (1, 16)),
}
every_scheme = pytest.mark.parametrize("name", SCHEMES)


def fused_request():
    return AllocationRequest((256, 64), torch.bfloat16, (128, 64, 64), ("q", "k", "v"))


def source(rows, columns):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "text"),
    [
        ("w4a16", (96, 64), torch.bfloat16, "N = 96 is not a multiple of 64"),
        ("fp8_e4m3_a16", (64, 48), torch.bfloat16, "K = 48 is not a multiple of 32"),
        ("fp8_e4m3_a8", (64, 96), torch.bfloat16, "K = 96 is not a multiple of 64"),
        ("w4a16", (64, 64), torch.float32, r"params_dtype is torch\.float32.*bfloat16"),
        (
            "mxfp4_a16",
            (64, 64),
            torch.float16,
            r"params_dtype is torch\.float16; allowed: torch\.b",
        ),
        ("fp8_e5m2_a8", (64, 64), torch.float16, r"allowed: torch\.bfloat16;"),
    ],
)
def test_packed_layers_that_do_not_fit(name, shape, dtype, text, make_layer):
    with pytest.raises(QuantConfigError, match=text) as error:
        HummingSpec(SCHEMES[name], 90).allocate(make_layer(), AllocationRequest(shape, dtype))
    assert "model.layers.0.mlp.down_proj" in str(error.value)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (AllocationRequest((64, 48), torch.bfloat16), "K = 48 is not a multiple of 32"),
        (AllocationRequest((96, 64), torch.bfloat16), "N = 96 is not a multiple of 64"),
        (
            AllocationRequest((128, 64), torch.bfloat16, (96, 32), ("q", "k")),
            "width of leg 'q' = 96 is not a multiple of 64",
        ),
        (AllocationRequest((64, 64), torch.int8), "params_dtype torch.int8"),
    ],
)
def test_raw_layers_need_whole_blocks(request_, text, make_layer):
    spec = materialize(SCHEMES["fp8_e4m3_block_a8"])
    with pytest.raises(QuantConfigError, match=text):
        spec.allocate(make_layer(), request_)


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (lambda: ("weight_scale", torch.ones(64), "q"), "cannot use checkpoint tensor"),
        (lambda: ("weight", source(128, 64), "gate"), "unknown leg 'gate'; allowed: 'q'"),
        (
            lambda: ("weight", torch.ones(128, 64, dtype=torch.int8), "q"),
            "is torch.int8, but an un",
        ),
        (
            lambda: ("weight", source(64, 64), "q"),
            r"shape \[64, 64\], the layer expects \[128, 64\]",
        ),
        (
            lambda: ("weight", source(128, 64) * torch.nan, "q"),
            "down_proj: cannot quantize a weight",
        ),
    ],
)
def test_sources_that_cannot_be_loaded(load, text, make_layer):
    spec = materialize(SCHEMES["w4a16"])
    layer = make_layer()
    spec.allocate(layer, fused_request())
    with pytest.raises(QuantConfigError, match=text):
        spec.load_weight(layer, *load())
    assert len(spec.missing_parts(layer)) == 3


@every_scheme
def test_legs_are_loaded_once_and_all_of_them(name, make_layer):
    spec = materialize(SCHEMES[name])
    layer = make_layer()
    spec.allocate(layer, fused_request())
    spec.load_weight(layer, "weight", source(128, 64), "q")
    with pytest.raises(QuantConfigError, match="of leg 'q' is loaded twice"):
        spec.load_weight(layer, "weight", source(128, 64), "q")
    spec.load_weight(layer, "weight", source(64, 64), "v")
    with pytest.raises(QuantConfigError, match=r"never loaded: .*weight\[k\]"):
        spec.process_after_loading(layer)
    with pytest.raises(QuantConfigError, match="process_after_loading before reading"):
        spec.dequantize_weight(layer)
    spec.load_weight(layer, "weight", source(64, 64), "k")
    spec.process_after_loading(layer)
    with pytest.raises(QuantConfigError, match="packed already and cannot take 'weight'"):
        spec.load_weight(layer, "weight", source(128, 64), "q")


def test_slices_that_cut_a_group_are_an_error(make_layer):
    spec = materialize(SCHEMES["w4a16"])
    layer = make_layer()
    request = AllocationRequest((64, 64), torch.bfloat16, slices=(LegSlice((64, 128), 0, 16),))
    spec.allocate(layer, request)
    with pytest.raises(QuantConfigError, match="16 to 80 of 128 do not fit the entries"):
        spec.load_weight(layer, "weight", source(64, 128))


def test_packing_needs_the_gpu_it_was_asked_for(make_layer):
    spec = HummingSpec(SCHEMES["w4a16"], 90)
    layer = make_layer()
    spec.allocate(layer, AllocationRequest((64, 64), torch.bfloat16))
    spec.load_weight(layer, "weight", source(64, 64))
    with pytest.raises(QuantConfigError, match="on an NVIDIA GPU, but the layer is on cpu"):
        spec.process_after_loading(layer)


def test_packed_layers_are_neither_saved_nor_read(make_layer, monkeypatch):
    def pack(layer, stored, raw, device):
        assert raw["weight"].device.type == "cpu"
        return SimpleNamespace(shape_n=64), {
            "weight": raw["weight"].t().contiguous(),
            "weight_scale": raw["weight_scale"],
        }

    monkeypatch.setattr(humming_pack, "pack", pack)
    spec = HummingSpec(SCHEMES["w4a16"], 90)
    layer = make_layer()
    spec.allocate(layer, AllocationRequest((64, 64), torch.bfloat16))
    spec.load_weight(layer, "weight", source(64, 64))
    spec.process_after_loading(layer)
    assert layer.humming_config.shape_n == 64
    assert layer.weight.shape == (8, 64)
    assert layer.weight.loader_preserves_dtype
    with pytest.raises(QuantConfigError, match="cannot be read back"):
        spec.dequantize_weight(layer)
    with pytest.raises(QuantConfigError, match=r"down_proj: the weight is packed.*cannot be saved"):
        nn.Sequential(layer).state_dict()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (AssertionError(), r"no kernel for N = 64, K = 96 on this GPU \(SM90\); keep"),
        (ValueError("odd"), r"\(SM90\): odd"),
        (
            [[0, 8, {"block_shape": (8, 128, 32)}]],
            r"N = 64, K = 96 is not a multiple of .*\(128, 32",
        ),
        ([[0, 8, {"block_shape": (8, 64, 64)}]], r"tile \(64, 64\)"),
        ([[0, 8, {"block_shape": (8, 64, 32)}]], None),
    ],
)
def test_tiles_divide_the_layer_for_every_batch(answer, text, make_layer, monkeypatch):
    def heuristics(config, device):
        if isinstance(answer, Exception):
            raise answer
        return answer

    tune = ModuleType("humming.tune")
    tune.get_heuristics_config = heuristics
    monkeypatch.setitem(sys.modules, "humming", ModuleType("humming"))
    monkeypatch.setitem(sys.modules, "humming.tune", tune)
    config = SimpleNamespace(shape_n=64, shape_k=96, sm_version=90)
    if text is None:
        humming_pack.check_tiles(make_layer(), config, torch.device("cpu"))
        return
    with pytest.raises(QuantConfigError, match=text):
        humming_pack.check_tiles(make_layer(), config, torch.device("cpu"))


def test_schemes_of_other_formats_are_refused():
    offline = QuantScheme(SCHEMES["w4a16"].weight)
    rotated_weight = TensorQuant("int8", "per_channel", rotation_group=64)
    rotated = QuantScheme(rotated_weight, token("int8"), online=True)
    for scheme in (offline, rotated):
        with pytest.raises(QuantConfigError, match="quantized at load and not rotated"):
            HummingSpec(scheme)
        assert build(scheme, 90) is None
    four_bits = QuantScheme(
        SCHEMES["nvfp4_a16"].weight,
        TensorQuant("nvfp4", "block", block_shape=(1, 16), micro_scaled=True, dynamic=True),
        online=True,
    )
    assert build(four_bits, 90) is None
    assert build(None, 90) is None
