import pytest
import torch

from phyai_quant import (
    Matcher,
    QuantConfigError,
    QuantPlan,
    QuantScheme,
    Rule,
    TensorQuant,
    load_quant_plan,
)
from phyai_quant.checkpoint import check_unquantized_dtypes

FP8 = QuantScheme(TensorQuant("fp8_e4m3", "per_channel"))
DOWN = "layers.0.mlp.down_proj"


@pytest.mark.parametrize("extra", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_no_config_is_no_plan(checkpoint, extra, tmp_path):
    assert load_quant_plan(tmp_path / "missing") is None
    assert load_quant_plan(tmp_path) is None
    assert load_quant_plan(checkpoint(**extra)) is None
    assert load_quant_plan(str(checkpoint(text_config=None, **extra))) is None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "not a valid JSON file"),
        ("[]", "expected a JSON object, got list"),
        ("[" * 100_000, "not a valid JSON file"),
        ("\udcff", "not a valid JSON file"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_unreadable_files_are_named(tmp_path, content, text, name):
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(QuantConfigError) as error:
        load_quant_plan(tmp_path)
    assert text in str(error.value)
    assert name in str(error.value)


def test_a_config_of_the_wrong_type_is_named(checkpoint):
    with pytest.raises(QuantConfigError, match="quantization_config: expected an object, got 3"):
        load_quant_plan(checkpoint(3))


@pytest.mark.parametrize("value", [False, 0, "", [], "fp8"])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "text_config"])
def test_other_types_are_not_read_as_absent(checkpoint, key, value):
    with pytest.raises(QuantConfigError, match=f"{key}: expected an object, got"):
        load_quant_plan(checkpoint(**{key: value}))


QUANTIZED = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": QUANTIZED},
        {"llm_config": QUANTIZED, "vision_config": {"hidden_size": 8}},
        {"language_config": QUANTIZED},
        {"thinker_config": {"text_config": QUANTIZED}},
        {**QUANTIZED, "text_config": QUANTIZED, "vision_config": QUANTIZED},
    ],
)
def test_configs_of_the_language_model_count(checkpoint, config):
    assert load_quant_plan(checkpoint(**config)).default.weight.dtype == "fp8_e4m3"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"vision_config": QUANTIZED}, "a config for vision_config alone is not supported; put"),
        ({"talker_config": {"text_config": QUANTIZED}}, "a config for talker_config alone is not"),
        (
            {**QUANTIZED, "vision_config": {"quantization_config": {"quant_method": "gptq"}}},
            "vision_config.quantization_config contradict each other",
        ),
        (
            {**QUANTIZED, "compression_config": {"quant_method": "compressed-tensors"}},
            "compression_config contradict each other; keep the one that",
        ),
    ],
)
def test_configs_of_other_parts_are_refused(checkpoint, config, text):
    with pytest.raises(QuantConfigError) as error:
        load_quant_plan(checkpoint(**config))
    assert text in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_repeated_keys_and_odd_numbers_are_refused(tmp_path, name):
    (tmp_path / name).write_text('{"quantization": {"quant_algo": "FP8", "quant_algo": "NVFP4"}}')
    with pytest.raises(QuantConfigError, match=rf"{name}: key 'quant_algo' stands twice in one"):
        load_quant_plan(tmp_path)
    (tmp_path / name).write_text('{"quantization": {"group_size": Infinity}}')
    with pytest.raises(QuantConfigError, match="Infinity is not JSON"):
        load_quant_plan(tmp_path)


def test_a_directory_in_place_of_a_file_is_named(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(QuantConfigError, match=r"config\.json: not a valid JSON file"):
        load_quant_plan(tmp_path)


@pytest.mark.parametrize(
    "dtype",
    ["F8_E4M3", "F8_E5M2", "I8", "U8", torch.float8_e4m3fn, torch.int8, "torch.uint8", "F4"],
    ids=str,
)
def test_quantized_weights_without_a_config_are_refused(dtype):
    names = {f"{DOWN}.weight": dtype, "layers.0.norm.weight": "BF16"}
    with pytest.raises(QuantConfigError) as error:
        check_unquantized_dtypes(names, None)
    assert f"{DOWN}.weight ({dtype}): the checkpoint declares no quantization" in str(error.value)
    assert "norm" not in str(error.value)


@pytest.mark.parametrize("dtype", ["BF16", "F32", "I64", "BOOL", torch.float16, torch.int32])
def test_other_dtypes_pass(dtype):
    check_unquantized_dtypes({f"{DOWN}.weight": dtype, "weight": dtype}, None)


def test_other_tensors_of_small_integers_pass():
    check_unquantized_dtypes({"embed.position_mask": "U8", "weight": "BF16"}, None)


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [
        ("weight_scale", "F32"),
        ("weight_scale_inv", "F32"),
        ("weight_scale_2", "F32"),
        ("input_scale", "F32"),
        ("weight_packed", "I32"),
    ],
)
def test_scales_of_unquantized_layers_are_refused(tensor, dtype):
    plan = QuantPlan((Rule(Matcher("name", DOWN), None, "config.json: ignore"),), FP8)
    with pytest.raises(QuantConfigError) as error:
        check_unquantized_dtypes({f"{DOWN}.{tensor}": dtype}, plan)
    text = str(error.value)
    assert f"{DOWN}.{tensor} ({dtype})" in text
    assert f"kept unquantized by name '{DOWN}' -> unquantized (config.json: ignore)" in text


def test_layers_outside_every_rule_are_named_with_the_file():
    rules = (Rule(Matcher("name", "other"), FP8),)
    with pytest.raises(QuantConfigError, match=r"no rule of config\.json"):
        check_unquantized_dtypes({f"{DOWN}.weight": "I8"}, QuantPlan(rules, source="config.json"))


def test_planned_layers_pass_by_name_and_by_class():
    names = {f"{DOWN}.weight": "F8_E4M3", f"{DOWN}.weight_scale": "F32"}
    for matcher in (Matcher("name", DOWN), Matcher("module_cls", "Linear")):
        check_unquantized_dtypes(names, QuantPlan((Rule(matcher, FP8),)))
    check_unquantized_dtypes(names, QuantPlan(default=FP8))


def test_a_policy_over_a_quantized_checkpoint_is_refused():
    online = QuantScheme(TensorQuant("int8", "per_channel"), online=True)
    with pytest.raises(QuantConfigError, match="already quantized, but the default expects"):
        check_unquantized_dtypes({f"{DOWN}.weight": "I8"}, QuantPlan(default=online))
    rule = Rule(Matcher("glob", "*"), online, "quantization.rules[0]")
    with pytest.raises(QuantConfigError, match=r"quantization\.rules\[0\]"):
        check_unquantized_dtypes({f"{DOWN}.weight": "I8"}, QuantPlan((rule,)))


def test_long_lists_are_cut():
    names = {f"layers.{i}.weight": "I8" for i in range(33)}
    with pytest.raises(QuantConfigError) as error:
        check_unquantized_dtypes(names, None)
    assert "layers.19.weight" in str(error.value)
    assert "layers.20.weight" not in str(error.value)
    assert "and 13 more" in str(error.value)
