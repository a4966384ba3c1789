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


FP8_ARGS = {"num_bits": 8, "type": "float", "dynamic": False}
FP4_ARGS = {"num_bits": 4, "type": "float", "dynamic": False, "group_size": 16}


def groups(args, targets=("Linear",), act=True):
    group = {"weights": args, "targets": list(targets)}
    return {"config_groups": {"group_0": {**group, **({"input_activations": args} if act else {})}}}


@pytest.mark.parametrize(
    ("algo", "args", "weight", "act"),
    [
        ("FP8", FP8_ARGS, "fp8_e4m3 per_tensor", "fp8_e4m3 per_tensor"),
        (
            "NVFP4",
            FP4_ARGS,
            "nvfp4 block[1,16] micro-scaled",
            "nvfp4 block[1,16] dynamic micro-scaled",
        ),
    ],
)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("both_files", [True, False])
def test_groups_and_algorithm_say_the_same(checkpoint, algo, args, weight, act, named, both_files):
    values = {**groups(args), **({"quant_algo": algo} if named else {})}
    alone = standalone(quant_algo=algo) if both_files else None
    scheme = load_quant_plan(checkpoint(inline(**values), alone)).resolve("a.b", "Linear")
    assert (scheme.weight.describe(), scheme.input.describe()) == (weight, act)


def test_mixed_precision_may_list_groups(checkpoint):
    values = {"quant_algo": "MIXED_PRECISION", **groups(FP8_ARGS, ["a.b", "re:.*c$"])}
    plan = load_quant_plan(checkpoint(inline(**values)))
    assert describe(plan, "a.b") == describe(plan, "x.c") == "fp8_e4m3 per_tensor"
    assert describe(plan, "a.d") is None


def test_a_quantized_cache_alone_quantizes_no_layer(checkpoint):
    config = standalone(quant_algo=None, kv_cache_quant_algo="FP8")
    with pytest.warns(UserWarning, match="quantized KV cache"):
        plan = load_quant_plan(checkpoint(standalone=config))
    assert plan.rules == ()
    assert plan.default is None
    assert plan.kv_cache.dtype == "fp8_e4m3"


def test_the_producer_names_the_method(checkpoint):
    plan = load_quant_plan(checkpoint({**PRODUCER, "quant_algo": "FP8"}))
    assert describe(plan, "a.b") == "fp8_e4m3 per_tensor"


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
        (groups(FP4_ARGS), ["contradict each other; ", "nvfp4", "fp8_e4m3"]),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}, ["about the KV cache"]),
        ({"quant_method": "compressed-tensors"}, ["in different formats (compressed-tensors, "]),
        ({"quant_method": "awq"}, ["is 'awq' but"]),
    ],
)
def test_standalone_and_inline_contradict(checkpoint, inline_values, texts):
    alone = standalone(quant_algo="FP8", kv_cache_quant_algo="FP8")
    directory = checkpoint(inline(**inline_values), alone)
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
        (
            {"quant_algo": "FP8", **groups(FP4_ARGS)},
            "quantization.quant_algo: 'FP8' and ",
        ),
        (
            {"quant_algo": "NVFP4", **groups(FP4_ARGS, act=False)},
            "config_groups.group_0.targets: Linear contradict each other",
        ),
        (
            {
                "quant_algo": "FP8",
                "exclude_modules": ["a.b"],
                "quantized_layers": {"a.b": {"quant_algo": "FP8"}},
            },
            "quantization.exclude_modules: a.b contradict each other",
        ),
        ({"quant_algo": "FP8", "quantized_layers": {"a": None}}, "quantized_layers.a: is null"),
        (
            {"quant_algo": "FP8", "kv_cache_quant_algo": "INT8", "kv_cache_scheme": "FP8"},
            "kv_cache_quant_algo: 'INT8' and kv_cache_scheme contradict each other",
        ),
        ({"quant_algo": None}, "quant_algo: names no algorithm"),
    ],
)
def test_bad_values_name_file_and_key(checkpoint, values, text):
    directory = checkpoint(standalone=standalone(**values))
    with pytest.raises(QuantConfigError) as error:
        load_quant_plan(directory)
    assert text in str(error.value)
    assert str(directory / "hf_quant_config.json") in str(error.value)


def test_one_config_in_two_places_is_refused(checkpoint):
    nested = inline(quant_algo="FP8", quantization={"quant_algo": "FP8"})
    with pytest.raises(QuantConfigError, match=r"quant_algo: stands beside .*\.quantization; keep"):
        load_quant_plan(checkpoint(nested))


def test_unknown_keys_warn(checkpoint):
    layers = {"a": {"quant_algo": "FP8", "surprise": 1}}
    directory = checkpoint(standalone=standalone(quant_algo="FP8", quantized_layers=layers))
    with pytest.warns(UserWarning, match="ignoring unknown keys surprise"):
        load_quant_plan(directory)
