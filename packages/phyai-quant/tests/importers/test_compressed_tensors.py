import pytest

from phyai_quant import QuantConfigError, QuantScheme, TensorQuant, load_quant_plan

METHOD = {"quant_method": "compressed-tensors"}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
FP8_SCHEME = QuantScheme(
    TensorQuant("fp8_e4m3", "per_channel"), TensorQuant("fp8_e4m3", "per_channel", dynamic=True)
)
INT8_SCHEME = QuantScheme(TensorQuant("int8", "per_channel"))
ATTN = "model.layers.0.self_attn"


def group(targets, weights=FP8, act=FP8_TOKEN):
    return {"targets": targets, "weights": weights, "input_activations": act}


def config(*groups, **extra):
    return {**METHOD, "config_groups": {f"group_{i}": g for i, g in enumerate(groups)}, **extra}


def test_a_whole_file(checkpoint):
    plan = load_quant_plan(
        checkpoint(
            config(
                {**group(["Linear"]), "output_activations": None, "format": "float-quantized"},
                format="float-quantized",
                global_compression_ratio=1.3,
                ignore=["lm_head", "re:.*vision.*"],
                kv_cache_scheme=None,
                quantization_status="compressed",
                sparsity_config={},
                transform_config={},
                version="0.12.0",
            )
        )
    )
    assert plan.resolve("model.layers.0.mlp.down_proj", "RowParallelLinear") == FP8_SCHEME
    assert plan.resolve("model.layers.0.mlp.down_proj") is None
    assert plan.resolve("model.layers.0.conv", "Conv2d") is None
    assert plan.resolve("lm_head", "Linear") is None
    assert plan.resolve("model.vision.fc1", "Linear") is None
    assert plan.kv_cache is None


@pytest.mark.parametrize("value", [None, {}])
@pytest.mark.filterwarnings("error")
def test_an_empty_sparsity_of_experts_is_known(checkpoint, value):
    plan = load_quant_plan(checkpoint(config(group(["Linear"]), moe_sparsity_config=value)))
    assert plan.resolve("a.b", "Linear") == FP8_SCHEME
    sparse = config(group(["Linear"]), moe_sparsity_config={"experts": 2})
    with pytest.raises(QuantConfigError, match="moe_sparsity_config: is not supported"):
        load_quant_plan(checkpoint(sparse))


@pytest.mark.parametrize(
    "ignore",
    [
        [f"{ATTN}.qkv_proj"],
        [f"{ATTN}.q_proj", f"{ATTN}.k_proj", f"{ATTN}.v_proj"],
        [f"{ATTN}.q_proj.linear", f"{ATTN}.k_proj.linear", f"{ATTN}.v_proj.linear"],
        [r"re:.*self_attn\.(q|k|v)_proj$"],
        [r"re:.*self_attn\..*"],
    ],
    ids=["fused", "legs", "wrapped", "regex of legs", "regex of parent"],
)
@pytest.mark.parametrize("name", ["qkv_proj", "q_proj", "v_proj"])
def test_ignore_lists_reach_fused_layers(checkpoint, ignore, name):
    plan = load_quant_plan(checkpoint(config(group(["Linear"]), ignore=ignore)))
    assert plan.resolve(f"{ATTN}.{name}", "Linear") is None
    assert plan.resolve("model.layers.0.mlp.down_proj", "Linear") == FP8_SCHEME


def test_targets_go_from_exact_to_class_in_any_group_order(checkpoint):
    groups = (
        group(["Linear"], INT8, None),
        group(["re:.*down_proj"], {**INT8, "strategy": "tensor"}, None),
        group(["model.layers.0.mlp.down_proj"]),
    )
    for order in (groups, groups[::-1]):
        plan = load_quant_plan(checkpoint(config(*order)))
        assert plan.resolve("model.layers.0.mlp.down_proj", "Linear") == FP8_SCHEME
        tensor = plan.resolve("model.layers.1.mlp.down_proj", "Linear").weight
        assert tensor.granularity == "per_tensor"
        assert plan.resolve("model.layers.1.mlp.up_proj", "Linear") == INT8_SCHEME


def test_kv_cache_only_configs_have_no_linear_rule(checkpoint):
    directory = checkpoint(
        config(
            {"targets": [], "weights": None, "input_activations": None},
            format="dense",
            kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"},
        )
    )
    with pytest.warns(UserWarning, match="quantized KV cache"):
        plan = load_quant_plan(directory)
    assert plan.rules == ()
    assert plan.resolve(f"{ATTN}.q_proj", "Linear") is None
    assert plan.kv_cache == TensorQuant("fp8_e4m3", "per_tensor")


def test_group_size_is_kept(checkpoint):
    weights = {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group"}
    plan = load_quant_plan(checkpoint(config(group(["Linear"], weights, None))))
    assert plan.resolve("a.b", "Linear").weight == TensorQuant(
        "int4", "block", block_shape=(1, 128)
    )


def test_targets_may_be_absent_and_weights_null(checkpoint):
    plan = load_quant_plan(checkpoint(config({"weights": FP8, "input_activations": None})))
    assert plan.resolve("a.b", "Linear").weight_only
    kept = {"targets": ["re:.*head"], "weights": None}
    plan = load_quant_plan(checkpoint(config(kept, group(["Linear"]))))
    assert plan.resolve("a.head", "Linear") is None
    assert plan.resolve("a.b", "Linear") == FP8_SCHEME


@pytest.mark.parametrize(
    ("storage", "weights", "dtype"),
    [
        ("int-quantized", INT8, "int8"),
        ("naive-quantized", FP8, "fp8_e4m3"),
        ("pack-quantized", {"num_bits": 4, "group_size": 32}, "int4"),
        ("pack-quantized", {"num_bits": 8, "group_size": 32, "symmetric": False}, "int8"),
        ("mxfp8-quantized", {**FP8, "strategy": "group", "group_size": 32}, "fp8_e4m3"),
        (
            "nvfp4-pack-quantized",
            {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
            "nvfp4",
        ),
    ],
)
@pytest.mark.parametrize("place", ["top", "group"])
def test_formats_agree_with_their_weights(checkpoint, storage, weights, dtype, place):
    extra = {"format": storage}
    mixed = {"format": "mixed-precision"}
    quantized = {**group(["Linear"], weights, None), **(extra if place == "group" else {})}
    plan = load_quant_plan(checkpoint(config(quantized, **(mixed if place == "group" else extra))))
    weight = plan.resolve("a.b", "Linear").weight
    assert weight.dtype == dtype
    assert weight.micro_scaled is (storage in ("mxfp8-quantized", "nvfp4-pack-quantized"))


def test_presets_replace_groups(checkpoint):
    groups = {"fp8_dynamic": ["Linear"], "UNQUANTIZED": ["re:.*head"]}
    plan = load_quant_plan(checkpoint({**METHOD, "config_groups": groups}))
    assert plan.resolve("a.b", "Linear") == FP8_SCHEME
    assert plan.resolve("lm_head", "Linear") is None


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_both_places_and_nested_configs_are_read(checkpoint, key):
    nested = {"text_config": {key: config(group(["Linear"]))}}
    assert load_quant_plan(checkpoint(**nested)).resolve("a.b", "Linear") == FP8_SCHEME
    top = load_quant_plan(checkpoint(**{key: config(group(["Linear"]))}))
    assert top.resolve("a.b", "Linear") == FP8_SCHEME


def test_equal_nested_configs_agree_and_others_do_not(checkpoint):
    same = config(group(["Linear"]))
    plan = load_quant_plan(checkpoint(same, text_config={"quantization_config": same}))
    assert plan.resolve("a.b", "Linear") == FP8_SCHEME
    other = {"text_config": {"quantization_config": {"quant_method": "fp8"}}}
    with pytest.raises(QuantConfigError, match=r"text_config\.quantization_config contradict"):
        load_quant_plan(checkpoint(same, **other))


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (config(group(["Linear"]), format="marlin-24"), "format: 'marlin-24' is not supported"),
        (config(group(["Linear"]), format="sparse-bitmask"), "'sparse-bitmask' is not supported"),
        (config({**group(["Linear"]), "format": "marlin-24"}), "group_0.format: 'marlin-24'"),
        (config(group(["Linear"]), format="dense"), "format 'dense' and quantized weights"),
        (config(group(["Linear"]), sparsity_config={"format": "2:4"}), "sparsity_config: is not"),
        (
            config(group(["Linear"]), transform_config={"a": {"type": "hadamard"}}),
            "transform_config",
        ),
        (config({**group(["Linear"]), "output_activations": FP8}), "output_activations"),
        (config({**group(["Linear"]), "extra": 1}), "config_groups.group_0.extra: unknown key"),
        (config(group(["Linear"], None)), "input_activations"),
        (config(group("Linear")), "group_0.targets: 'Linear' is not a list"),
        (config(group(["re:("])), "group_0.targets: invalid regular expression '('"),
        (config(group(["a..b"])), "has an empty segment"),
        (config([]), "config_groups.group_0: unknown preset; known: UNQUANTIZED"),
        (config(3), "config_groups.group_0: expected an object, got 3"),
        ({**METHOD, "config_groups": []}, "config_groups: expected an object, got []"),
        (
            config(group(["Linear"], {"strategy": "tensor", "group_size": 128})),
            "config_groups.group_0.weights: strategy 'tensor' and group_size 128 contradict",
        ),
        ({**METHOD, "config_groups": {"W3A16": ["Linear"]}}, "num_bits 3 is not supported"),
        (config({"targets": ["Linear"]}), "group_0.weights: required key is missing; null keeps"),
        (config({"weights": {}}), "group_0.weights: is empty; give num_bits, type and strategy"),
        (config(group(["Linear"]), kv_cache_scheme={}), "kv_cache_scheme: is empty; give"),
        (
            config(group(["Linear"], INT8, {"type": "float", "num_bits": 4, "group_size": 32})),
            "group_0.input_activations: mxfp4 block[1,32] micro-scaled with int8 weights is not "
            "supported; supported: int8, fp8_e4m3",
        ),
        (
            config(group(["Linear"], FP8, {**FP8_TOKEN, "dynamic": False})),
            "group_0.input_activations: fp8_e4m3 per_channel needs scales that are computed at run",
        ),
        ({**METHOD, "config_groups": {"g": None}}, "config_groups.g: is null; give the group"),
        (config(), "config_groups: quantizes no weights and no cache; give a group"),
        (METHOD, "config_groups: quantizes no weights and no cache"),
        (config(group([])), "config_groups: quantizes no weights and no cache"),
        (config({"targets": ["Linear"], "weights": None}), "quantizes no weights and no cache"),
        (
            config(group(["Linear"], INT8, None), format="float-quantized"),
            "group_0.weights: format 'float-quantized' and quantized weights int8 per_channel "
            "contradict; formats of int8: int-quantized, naive-quantized, pack-quantized, mixed",
        ),
        (
            config({**group(["Linear"], FP8, None), "format": "pack-quantized"}),
            "format 'pack-quantized' and quantized weights fp8_e4m3 per_channel contradict",
        ),
        (config(group(["Linear"]), format="mxfp8-quantized"), "'mxfp8-quantized' and quantized"),
        (config(group(["Linear"]), format="mxfp6-pack-quantized"), "'mxfp6-pack-quantized' is not"),
        (
            config(group(["a.b"]), group(["a.b"], INT8, None)),
            "config_groups.group_1.targets: a.b and ",
        ),
        (
            config(group(["Linear"], INT8, None), group(["Linear"])),
            "config_groups.group_1.targets: Linear and ",
        ),
        (config(group(["a.b", "Linear"]), ignore=["a.b"]), "config_groups.group_0.targets: a.b"),
        (config(group(["Linear"]), ignore="lm_head"), "ignore: 'lm_head' is not a list"),
    ],
)
def test_bad_values_name_file_and_key(checkpoint, bad, text):
    directory = checkpoint(bad)
    with pytest.raises(QuantConfigError) as error:
        load_quant_plan(directory)
    assert text in str(error.value)
    assert str(directory / "config.json") in str(error.value)


def test_sparsity_that_says_dense_is_no_sparsity(checkpoint):
    extra = {"sparsity_config": {"format": "dense"}, "transform_config": {"config_groups": {}}}
    plan = load_quant_plan(checkpoint(config(group(["Linear"]), **extra)))
    assert plan.resolve("a.b", "Linear") == FP8_SCHEME
