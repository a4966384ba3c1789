import importlib
import importlib.util
from types import SimpleNamespace

import pytest

from phyai_quant import QuantConfigError, QuantScheme, TensorQuant, materialize

# the package exports the function under the same name
MODULE = importlib.import_module("phyai_quant.materialize")
HUMMING = importlib.import_module("phyai_quant.specs.humming")
CHECKPOINT = importlib.import_module("phyai_quant.specs.humming_checkpoint")
TOKEN_INT8 = TensorQuant("int8", "per_channel", dynamic=True)
TOKEN_FP8 = TensorQuant("fp8_e4m3", "per_channel", dynamic=True)
INT4 = TensorQuant("int4", "block", block_shape=(1, 128))
ONLINE = {
    "a16": QuantScheme(INT4, online=True),
    "int8": QuantScheme(INT4, TOKEN_INT8, online=True),
    "fp8": QuantScheme(INT4, TOKEN_FP8, online=True),
    "per_channel int8": QuantScheme(TensorQuant("int8", "per_channel"), TOKEN_INT8, online=True),
    "nvfp4": QuantScheme(
        TensorQuant("nvfp4", "block", micro_scaled=True, block_shape=(1, 16)), online=True
    ),
}


@pytest.mark.parametrize(
    ("scheme", "spec_id"),
    [
        (None, "bf16"),
        (QuantScheme(TensorQuant("bf16", "per_tensor")), "bf16"),
        (QuantScheme(TensorQuant("fp8_e4m3", "per_tensor")), "fp8_per_tensor"),
        (QuantScheme(TensorQuant("fp8_e4m3", "per_channel"), TOKEN_FP8), "fp8_per_channel"),
        (
            QuantScheme(TensorQuant("fp8_e4m3", "block", block_shape=(128, 64)), TOKEN_FP8),
            "fp8_block_128_64",
        ),
        (QuantScheme(TensorQuant("fp8_e5m2", "per_channel")), "fp8_e5m2_per_channel"),
        (
            QuantScheme(TensorQuant("fp8_e4m3", "block", micro_scaled=True, block_shape=(1, 32))),
            "mxfp8_block_1_32",
        ),
        (
            QuantScheme(
                TensorQuant("int8", "per_channel", rotation_group=64), TOKEN_INT8, online=True
            ),
            "convrot_int8_g64",
        ),
        (QuantScheme(TensorQuant("int8", "per_channel"), TOKEN_INT8), "int8_per_channel_int8"),
        (QuantScheme(INT4, TOKEN_INT8), "int4_packed_block_1_128_int8"),
    ],
)
@pytest.mark.parametrize("sm", [None, 75, 90])
def test_schemes_that_are_executed(scheme, spec_id, sm, monkeypatch):
    monkeypatch.setattr(CHECKPOINT, "find_spec", lambda name: None)
    assert materialize(scheme, sm).spec_id == spec_id


@pytest.mark.parametrize("name", ONLINE)
def test_without_a_gpu_the_same_codes_are_kept_raw(name):
    spec = materialize(ONLINE[name])
    assert spec.physical_signature.layout == "humming_raw"
    assert spec.spec_id.startswith("humming_raw_")


@pytest.mark.parametrize(("name", "sm", "floor"), [("a16", 75, 80), ("fp8", 86, 89)])
def test_below_the_floor_that_is_the_reason(name, sm, floor):
    with pytest.raises(QuantConfigError, match=f"needs SM{floor} or newer and this GPU is SM{sm}"):
        materialize(ONLINE[name], sm)


def test_a_missing_library_is_the_reason(monkeypatch):
    monkeypatch.setattr(HUMMING, "find_spec", lambda name: None)
    with pytest.raises(QuantConfigError, match="humming-kernels is not installed"):
        materialize(ONLINE["fp8"], 89)


@pytest.mark.parametrize("name", ONLINE)
def test_a_gpu_with_the_library_packs(name, monkeypatch):
    monkeypatch.setattr(HUMMING, "find_spec", lambda name: importlib.util.find_spec("json"))
    assert materialize(ONLINE[name], 90).physical_signature.layout == "humming"


def test_impossible_online_schemes_name_the_field():
    scheme = QuantScheme(INT4, TensorQuant("fp8_e5m2", "per_channel", dynamic=True), online=True)
    with pytest.raises(QuantConfigError, match=r"input\.dtype is fp8_e5m2; allowed: no input or"):
        materialize(scheme, 90)


@pytest.mark.parametrize(
    "scheme",
    [
        QuantScheme(TensorQuant("int8", "per_channel", rotation_group=64)),
        QuantScheme(INT4, TensorQuant("int8", "per_channel")),
        QuantScheme(
            TensorQuant("nvfp4", "block", micro_scaled=True, block_shape=(1, 16)), TOKEN_INT8
        ),
        QuantScheme(TensorQuant("mxfp4", "block", block_shape=(1, 32))),
        QuantScheme(TensorQuant("fp8_e4m3", "block", micro_scaled=True, block_shape=(1, 16))),
        QuantScheme(TensorQuant("fp8_e4m3", "per_channel"), TOKEN_INT8),
        QuantScheme(TensorQuant("fp8_e4m3", "per_channel", symmetric=False)),
        QuantScheme(TensorQuant("fp8_e4m3", "per_channel"), TensorQuant("fp8_e4m3", "per_channel")),
        QuantScheme(TensorQuant("bf16", "per_tensor"), TOKEN_INT8),
    ],
    ids=lambda scheme: scheme.describe(),
)
def test_formats_on_disk_that_nothing_stores_are_named(scheme, monkeypatch):
    monkeypatch.setattr(CHECKPOINT, "find_spec", lambda name: None)
    with pytest.raises(QuantConfigError, match="no weight format stores") as error:
        materialize(scheme, 90)
    assert scheme.describe() in str(error.value)
    assert "fp8_e4m3 and fp8_e5m2 (" in str(error.value)
    assert str(error.value).endswith("int4 groups (none)")


@pytest.mark.parametrize(
    ("act", "sm", "layout"),
    [
        (None, 120, "linear"),
        ("nvfp4", None, "linear"),
        ("nvfp4", 90, "linear"),
        ("nvfp4", 100, "128x4"),
        ("nvfp4", 120, "128x4"),
    ],
)
@pytest.mark.parametrize("online", [False, True])
def test_nvfp4_scales_are_tiled_for_block_scaled_products(act, sm, layout, online, monkeypatch):
    monkeypatch.setattr(HUMMING, "find_spec", lambda name: None)
    monkeypatch.setattr(CHECKPOINT, "find_spec", lambda name: None)
    block = {"micro_scaled": True, "block_shape": (1, 16)}
    token = None if act is None else TensorQuant(act, "block", dynamic=True, **block)
    scheme = QuantScheme(TensorQuant("nvfp4", "block", **block), token, online=online)
    if online and act is None:
        with pytest.raises(QuantConfigError, match="humming-kernels is not installed"):
            materialize(scheme, sm)
    else:
        assert materialize(scheme, sm).spec_id == f"nvfp4_block_16_{layout}"


def test_every_module_is_asked_in_order_and_hears_the_target(monkeypatch):
    asked = []

    def builder(name, answer):
        def build(scheme, sm):
            asked.append((name, scheme, sm))
            return answer

        return SimpleNamespace(build=build)

    modules = {"a": builder("a", None), "b": builder("b", "spec"), "c": builder("c", "late")}
    monkeypatch.setattr(MODULE, "_SPEC_MODULES", tuple(modules))
    monkeypatch.setattr(MODULE, "import_module", modules.__getitem__)
    assert materialize(None, 90) == "spec"
    assert asked == [("a", None, 90), ("b", None, 90)]
