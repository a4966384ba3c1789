import pytest

from phyai_quant import QuantConfigError, QuantScheme, TensorQuant, load_quant_plan

TOKEN = TensorQuant("fp8_e4m3", "per_channel", dynamic=True)
CHANNEL = TensorQuant("fp8_e4m3", "per_channel")
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        ({}, QuantScheme(CHANNEL, TOKEN)),
        ({"activation_scheme": "dynamic", "fmt": "e4m3"}, QuantScheme(CHANNEL, TOKEN)),
        (
            {"activation_scheme": "static"},
            QuantScheme(CHANNEL, TensorQuant("fp8_e4m3", "per_tensor")),
        ),
        (
            {"weight_block_size": [128, 64], "scale_fmt": "ue8m0"},
            QuantScheme(TensorQuant("fp8_e4m3", "block", block_shape=(128, 64)), TOKEN),
        ),
        ({"weight_block_size": None, "ignored_layers": None}, QuantScheme(CHANNEL, TOKEN)),
    ],
)
def test_default_scheme(checkpoint, config, scheme):
    plan = load_quant_plan(checkpoint({"quant_method": "fp8", **config}))
    assert plan.resolve("model.layers.0.self_attn.o_proj") == scheme
    assert not scheme.online


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_both_ignore_keys_mean_the_same(checkpoint, key):
    plan = load_quant_plan(checkpoint({"quant_method": "fp8", key: [Q_PROJ]}))
    assert plan.resolve(Q_PROJ) is None
    assert plan.resolve(Q_PROJ.replace("q_proj", "o_proj")) is not None


def test_both_ignore_keys_together_are_a_union(checkpoint):
    config = {
        "quant_method": "fp8",
        "ignored_layers": ["lm_head", "a.b"],
        "modules_to_not_convert": ["a.b", "c.d"],
    }
    plan = load_quant_plan(checkpoint(config))
    assert [plan.resolve(name) for name in ("lm_head", "a.b", "c.d")] == [None] * 3
    assert plan.resolve("c.e") is not None


def test_an_ignored_parent_covers_its_children(checkpoint):
    config = {"quant_method": "fp8", "modules_to_not_convert": ["model.vision_tower", "lm_head"]}
    plan = load_quant_plan(checkpoint(config))
    assert plan.resolve("model.vision_tower.layers.3.mlp.fc1") is None
    assert plan.resolve("vision_tower.layers.3.mlp.fc1") is None
    assert plan.resolve("model.vision_tower_2.fc1") is not None
    assert plan.unmatched(["vision_tower.fc1", "lm_head"]) == ()
    assert {rule.matcher.pattern for rule in plan.unmatched(["vision_tower.fc1"])} == {
        "lm_head",
        "lm_head.*",
    }


def test_a_multimodal_prefix_does_not_hide_an_entry(checkpoint):
    entry = "model.language_model.layers.1.ple.key_proj"
    plan = load_quant_plan(checkpoint({"quant_method": "fp8", "ignored_layers": [entry]}))
    assert plan.resolve("model.layers.1.ple.key_proj") is None


def test_partly_ignored_fused_layers_name_the_odd_leg(checkpoint):
    plan = load_quant_plan(checkpoint({"quant_method": "fp8", "ignored_layers": [Q_PROJ]}))
    with pytest.raises(QuantConfigError, match=r"q_proj: unquantized \[name"):
        plan.resolve("model.layers.0.self_attn.qkv_proj")


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("model.visual*", "model.visual.blocks.0.fc1"),
        ("*.gate", "model.layers.3.mlp.gate"),
        (r"re:.*\.experts\.\d+", "model.layers.3.mlp.experts.7.up_proj"),
    ],
)
def test_patterns_are_ignored_too(checkpoint, entry, name):
    plan = load_quant_plan(checkpoint({"quant_method": "fp8", "ignored_layers": [entry]}))
    assert plan.resolve(name) is None
    assert plan.resolve("model.layers.3.mlp.up_proj") is not None


@pytest.mark.parametrize("scheme", ["static", {"num_bits": 8, "type": "float"}])
def test_a_quantized_cache_is_kept_as_data(checkpoint, scheme):
    directory = checkpoint({"quant_method": "fp8", "kv_cache_scheme": scheme})
    with pytest.warns(UserWarning, match="quantized KV cache"):
        plan = load_quant_plan(directory)
    assert plan.kv_cache == TensorQuant("fp8_e4m3", "per_tensor")


def test_unknown_keys_warn(checkpoint):
    config = checkpoint({"quant_method": "fp8", "extra": 1})
    with pytest.warns(UserWarning, match="ignoring unknown keys extra"):
        load_quant_plan(config)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"activation_scheme": "token"}, "activation_scheme: 'token' is not allowed; allowed: dyn"),
        ({"fmt": "e5m2"}, "fmt: 'e5m2' is not allowed; allowed: e4m3"),
        ({"weight_block_size": [128]}, "weight_block_size: [128] is not two positive sizes"),
        ({"weight_block_size": 128}, "weight_block_size: 128 is not two positive sizes"),
        ({"weight_block_size": [128, 0]}, "is not two positive sizes"),
        ({"weight_block_size": [128.0, 128]}, "is not two positive sizes"),
        ({"ignored_layers": "lm_head"}, "ignored_layers: 'lm_head' is not a list of non-empty"),
        ({"ignored_layers": [1]}, "is not a list of non-empty strings"),
        (
            {"ignored_layers": [".transformer.layers.31.mlp.fc2"]},
            "layer name '.transformer.layers.31.mlp.fc2' has an empty segment",
        ),
        (
            {"kv_cache_scheme": "int8"},
            "kv_cache_scheme: 'int8' is not allowed; allowed: FP8, STATIC",
        ),
        ({"kv_cache_scheme": 8}, "kv_cache_scheme: expected an object, got 8"),
        (
            {"weight_block_size": [128, 128], "activation_scheme": "static"},
            "activation_scheme: activation_scheme 'static' and weight_block_size [128, 128] contra",
        ),
        ({"is_checkpoint_fp8_serialized": False}, "holds unquantized weights"),
        ({"dequantize": True}, "load the unquantized checkpoint instead"),
    ],
)
def test_bad_values_name_file_and_key(checkpoint, config, text):
    directory = checkpoint({"quant_method": "fp8", **config})
    with pytest.raises(QuantConfigError) as error:
        load_quant_plan(directory)
    assert text in str(error.value)
    assert f"{directory / 'config.json'}: quantization_config" in str(error.value)
