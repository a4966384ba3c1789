import pytest

from phyai_quant import QuantConfigError, load_quant_plan

PRODUCER = {"producer": {"name": "modelopt", "version": "0.29"}}


def standalone(**quantization):
    return {**PRODUCER, "quantization": quantization}


def inline(**values):
    return {"quant_method": "modelopt", **PRODUCER, **values}


def describe(plan, name):
    scheme = plan.resolve(name, "Linear")
    return None if scheme is None else scheme.weight.describe()


@pytest.mark.parametrize("place", ["inline", "standalone", "nested"])
@pytest.mark.parametrize("key", ["ignore", "exclude_modules"])
def test_exclusions_have_two_spellings_in_every_place(checkpoint, place, key):
    values = {"quant_algo": "NVFP4", "group_size": 16, key: ["lm_head", "model.vision*"]}
    directory = {
        "inline": lambda: checkpoint(inline(**values)),
        "standalone": lambda: checkpoint(standalone=standalone(**values)),
        "nested": lambda: checkpoint(inline(quantization=values)),
    }[place]()
    plan = load_quant_plan(directory)
    assert describe(plan, "lm_head") is None
    assert describe(plan, "model.vision_tower.fc1") is None
    assert describe(plan, "model.layers.0.mlp.up_proj") == "nvfp4 block[1,16] micro-scaled"


@pytest.mark.parametrize(
    ("pattern", "name", "excluded"),
    [
        ("model.layers.0*", "model.layers.0.mlp.down_proj", True),
        ("model.layers.0*", "layers.0.mlp.down_proj", True),
        ("model.layers.0.*", "model.layers.10.mlp.down_proj", False),
        ("*.gate", "model.layers.3.mlp.gate", True),
        ("*.gate", "model.layers.3.mlp.gate_proj", False),
        ("model.layers.0.self_attn*", "model.layers.0.self_attn.qkv_proj", True),
        ("*q_proj", "model.layers.0.self_attn.o_proj", False),
        ("model.vision_tower", "model.vision_tower.fc1", True),
        (r"re:.*\.fc\d$", "model.vision_tower.fc1", True),
    ],
)
def test_excluded_modules_are_patterns(checkpoint, pattern, name, excluded):
    config = standalone(quant_algo="FP8", exclude_modules=[pattern])
    plan = load_quant_plan(checkpoint(standalone=config))
    assert (describe(plan, name) is None) is excluded


def test_mixed_precision_quantizes_listed_layers_only(checkpoint):
    layers = {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.0.self_attn.k_proj": {"quant_algo": "FP8"},
        "model.layers.0.self_attn.v_proj": {"quant_algo": "FP8"},
        "model.layers.*.mlp.*": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    }
    config = standalone(quant_algo="MIXED_PRECISION", quantized_layers=layers)
    plan = load_quant_plan(checkpoint(standalone=config))
    assert describe(plan, "model.layers.0.self_attn.qkv_proj") == "fp8_e4m3 per_tensor"
    assert describe(plan, "model.layers.7.mlp.gate_up_proj") == "nvfp4 block[1,16] micro-scaled"
    assert describe(plan, "model.layers.0.self_attn.o_proj") is None


def test_listing_one_projection_quantizes_no_other(checkpoint):
    layers = {"a.o_proj": {"quant_algo": "FP8"}}
    config = standalone(quant_algo="MIXED_PRECISION", quantized_layers=layers)
    plan = load_quant_plan(checkpoint(standalone=config))
    assert describe(plan, "a.o_proj") == "fp8_e4m3 per_tensor"
    assert describe(plan, "a.qkv_proj") is None


def test_listed_layers_beside_one_algorithm_come_first(checkpoint):
    config = standalone(quant_algo="FP8", quantized_layers={"a.b": {"quant_algo": "NVFP4"}})
    plan = load_quant_plan(checkpoint(standalone=config))
    assert describe(plan, "a.b") == "nvfp4 block[1,16] micro-scaled"
    assert describe(plan, "a.c") == "fp8_e4m3 per_tensor"


def test_null_is_empty(checkpoint):
    config = standalone(
        quant_algo="FP8",
        quantized_layers=None,
        exclude_modules=None,
        kv_cache_quant_algo=None,
        group_size=None,
        has_zero_point=False,
        pre_quant_scale=False,
    )
    plan = load_quant_plan(checkpoint(standalone=config))
    assert plan.rules == ()
    assert plan.kv_cache is None


@pytest.mark.parametrize("algo", ["FP8", "INT8", "NVFP4"])
def test_kv_cache_is_kept(checkpoint, algo):
    directory = checkpoint(standalone=standalone(quant_algo="FP8", kv_cache_quant_algo=algo))
    with pytest.warns(UserWarning, match="quantized KV cache"):
        plan = load_quant_plan(directory)
    assert plan.kv_cache.dtype == {"FP8": "fp8_e4m3", "INT8": "int8", "NVFP4": "nvfp4"}[algo]


def test_inline_groups_without_an_algorithm(checkpoint):
    group = {"weights": {"num_bits": 8, "type": "float"}}
    plan = load_quant_plan(checkpoint(inline(config_groups={"group_0": group}, ignore=["lm_head"])))
    assert describe(plan, "a.b") == "fp8_e4m3 per_tensor"
    assert describe(plan, "lm_head") is None


@pytest.mark.parametrize(
    "method", [{"quant_method": "modelopt_fp8"}, {"quant_library": "modelopt"}, {}]
)
def test_standalone_and_inline_agree(checkpoint, method):
    directory = checkpoint(
        {**method, "quant_algo": "FP8", "ignore": ["lm_head"]},
        standalone(quant_algo="FP8", exclude_modules=["lm_head"]),
    )
    assert describe(load_quant_plan(directory), "a.b") == "fp8_e4m3 per_tensor"


@pytest.mark.parametrize(
    ("inline_values", "texts"),
    [
        ({"quant_algo": "NVFP4"}, ["contradict each other", "nvfp4", "fp8_e4m3"]),
        ({"quant_algo": "FP8", "ignore": ["b"]}, ["contradict each other about: ", "name b"]),
        ({"quant_method": "compressed-tensors"}, ["in different formats (compressed-tensors, "]),
        ({"quant_method": "awq"}, ["is 'awq' but"]),
    ],
)
def test_standalone_and_inline_contradict(checkpoint, inline_values, texts):
    directory = checkpoint(inline(**inline_values), standalone(quant_algo="FP8"))
    with pytest.raises(QuantConfigError) as error:
        load_quant_plan(directory)
    for text in [*texts, "config.json", "hf_quant_config.json"]:
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"quant_algo": "FP8", "pre_quant_scale": True}, "pre_quant_scale: True is not supported"),
        ({"quant_algo": "FP8", "has_zero_point": True}, "has_zero_point: True is not supported"),
        ({"quant_algo": 8}, "quant_algo: 8 is not allowed; allowed: a string"),
        (
            {"exclude_modules": ["a"]},
            "quant_algo: names no algorithm; allowed: quant_algo or config",
        ),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers: is empty although quant_algo"),
        ({"quant_algo": "FP8", "quantized_layers": []}, "quantized_layers: expected an object"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {}}},
            "quantized_layers[a.b].quant_algo: required key is missing",
        ),
        (
            {"quant_algo": "FP8", "quantized_layers": {"a": {"quant_algo": "INT4_AWQ"}}},
            "quantized_layers[a].quant_algo: 'INT4_AWQ' is not supported",
        ),
        (
            {
                "quant_algo": "FP8",
                "quantized_layers": {"a": {"quant_algo": "FP8", "pre_quant_scale": True}},
            },
            "quantized_layers[a].pre_quant_scale",
        ),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP4"}, "kv_cache_quant_algo: 'FP4' is not"),
        ({"quant_algo": "FP8", "exclude_modules": ["a..b"]}, "exclude_modules: layer name 'a..b'"),
    ],
)
def test_bad_values_name_file_and_key(checkpoint, values, text):
    directory = checkpoint(standalone=standalone(**values))
    with pytest.raises(QuantConfigError) as error:
        load_quant_plan(directory)
    assert text in str(error.value)
    assert str(directory / "hf_quant_config.json") in str(error.value)


def test_unknown_keys_warn(checkpoint):
    layers = {"a": {"quant_algo": "FP8", "surprise": 1}}
    directory = checkpoint(standalone=standalone(quant_algo="FP8", quantized_layers=layers))
    with pytest.warns(UserWarning, match="ignoring unknown keys surprise"):
        load_quant_plan(directory)
