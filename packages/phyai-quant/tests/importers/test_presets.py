import pytest

from phyai_quant import QuantConfigError, TensorQuant, load_quant_plan
from phyai_quant.importers.presets import preset_args, preset_names

SUPPORTED = {
    "W4A16": ("int4 block[1,128]", None),
    "W8A16": ("int8 per_channel", None),
    "W4A8": ("int4 block[1,128]", "int8 per_channel dynamic"),
    "W8A8": ("int8 per_channel", "int8 per_channel dynamic"),
    "INT8": ("int8 per_channel", "int8 per_channel dynamic"),
    "W4AFP8": ("int4 block[1,128]", "fp8_e4m3 per_channel dynamic"),
    "W4A16_ASYM": ("int4 block[1,128] asymmetric", None),
    "FP8": ("fp8_e4m3 per_tensor", "fp8_e4m3 per_tensor"),
    "FP8_DYNAMIC": ("fp8_e4m3 per_channel", "fp8_e4m3 per_channel dynamic"),
    "FP8_BLOCK": ("fp8_e4m3 block[128,128]", "fp8_e4m3 block[1,128] dynamic"),
    "NVFP4A16": ("nvfp4 block[1,16] micro-scaled", None),
    "NVFP4": ("nvfp4 block[1,16] micro-scaled", "nvfp4 block[1,16] dynamic micro-scaled"),
    "MXFP4A16": ("mxfp4 block[1,32] micro-scaled", None),
    "MXFP4": ("mxfp4 block[1,32] micro-scaled", "mxfp4 block[1,32] dynamic micro-scaled"),
    "MXFP8A16": ("fp8_e4m3 block[1,32] micro-scaled", None),
    "MXFP8": ("fp8_e4m3 block[1,32] micro-scaled", "fp8_e4m3 block[1,32] dynamic micro-scaled"),
}


def load(checkpoint, name):
    groups = {"config_groups": {name: ["Linear"]}}
    return load_quant_plan(checkpoint({"quant_method": "compressed-tensors", **groups}))


def describe(quant: TensorQuant | None):
    return None if quant is None else quant.describe()


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("name", SUPPORTED)
def test_presets(checkpoint, name, lower):
    plan = load(checkpoint, name.lower() if lower else name)
    scheme = plan.resolve("a.b", "Linear")
    assert (describe(scheme.weight), describe(scheme.input)) == SUPPORTED[name]


@pytest.mark.parametrize("name", sorted(set(preset_names()) - set(SUPPORTED) - {"UNQUANTIZED"}))
def test_other_presets_are_known_and_refused(checkpoint, name):
    with pytest.raises(QuantConfigError, match=rf"config_groups\.{name}\.\w+.*not supported"):
        load(checkpoint, name)


def test_unknown_names():
    assert preset_args("W9A9") is None
