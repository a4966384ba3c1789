import pytest

from phyai_quant import QuantConfigError
from phyai_quant.importers.base import Section
from phyai_quant.importers.modelopt_algos import algo_scheme

SCHEMES = {
    "FP8": ("fp8_e4m3 per_tensor", "fp8_e4m3 per_tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_e4m3 per_channel", "fp8_e4m3 per_channel dynamic"),
    "FP8_PB_WO": ("fp8_e4m3 block[128,128]", None),
    "FP8_PB_REAL": ("fp8_e4m3 block[128,128]", None),
    "NVFP4": ("nvfp4 block[1,16] micro-scaled", "nvfp4 block[1,16] dynamic micro-scaled"),
    "W4A16_NVFP4": ("nvfp4 block[1,16] micro-scaled", None),
    "W4A8_NVFP4_FP8": ("nvfp4 block[1,32] micro-scaled", "fp8_e4m3 per_tensor"),
    "W4A8_MXFP4_FP8": ("mxfp4 block[1,32] micro-scaled", "fp8_e4m3 per_tensor dynamic"),
    "MXFP4": ("mxfp4 block[1,32] micro-scaled", "mxfp4 block[1,32] dynamic micro-scaled"),
    "MXFP8": ("fp8_e4m3 block[1,32] micro-scaled", "fp8_e4m3 block[1,32] dynamic micro-scaled"),
    "W8A16": ("int8 per_channel", None),
}


def read(**values):
    return algo_scheme(Section(values, "hf_quant_config.json", "quantization"))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("spell", [str.upper, str.lower], ids=["upper", "lower"])
def test_algorithms(name, spell):
    scheme = read(quant_algo=spell(name))
    act = None if scheme.input is None else scheme.input.describe()
    assert (scheme.weight.describe(), act) == SCHEMES[name]
    assert not scheme.online


@pytest.mark.parametrize(
    "name",
    [
        "NVFP4_AWQ",
        "NVFP4_SVDQUANT",
        "W4A16_AWQ",
        "W4A8_AWQ",
        "INT4_AWQ",
        "W8A8_SQ_PER_CHANNEL",
        "INT8_SQ",
    ],
)
def test_smoothed_algorithms_say_why_they_are_refused(name):
    with pytest.raises(QuantConfigError, match=f"'{name}' is not supported: it scales inputs"):
        read(quant_algo=name)


@pytest.mark.parametrize("name", ["NVFP4_2", "MYFP8", "FP8_NEW", "FP4", ""])
def test_names_are_not_matched_by_parts(name):
    with pytest.raises(QuantConfigError, match=f"quant_algo: '{name}' is not supported; supported"):
        read(quant_algo=name)


@pytest.mark.parametrize(
    ("algo", "group", "allowed"),
    [("NVFP4", 16, True), ("NVFP4", 0, True), ("NVFP4", 32, False), ("FP8", 128, False)],
)
def test_group_size_must_agree(algo, group, allowed):
    if allowed:
        read(quant_algo=algo, group_size=group)
    else:
        with pytest.raises(QuantConfigError, match=f"'{algo}' and group_size {group} contradict"):
            read(quant_algo=algo, group_size=group)
