"""Quantization configs."""

import pytest

from phyai_quant import QuantConfigError, load_quant_plan
from phyai_quant.disk_checks import check_quantized_layers
from phyai_quant.plan import warn_unmatched

from .quantization_values import ATTN, MLP, compressed, modelopt, scheme

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def test_case_01_ignoring_a_fused_layer_and_its_shards_is_the_same(checkpoint):
    """An ignored fused layer covers its shards and the reverse; a lone shard is named.

    Handled in phyai_quant.plan.
    """
    fused = load_quant_plan(checkpoint(compressed("FP8", ignore=[f"{ATTN}.qkv_proj"])))
    shards = [f"{ATTN}.{leg}_proj" for leg in "qkv"]
    for plan in (fused, load_quant_plan(checkpoint(compressed("FP8", ignore=shards)))):
        assert all(scheme(plan, name) is None for name in (f"{ATTN}.qkv_proj", *shards))
    some = load_quant_plan(checkpoint(compressed("FP8", ignore=shards[:1])))
    with pytest.raises(QuantConfigError, match=r"q_proj: unquantized \[name"):
        scheme(some, f"{ATTN}.qkv_proj")


def test_case_02_a_wrapper_suffix_hides_no_ignore_entry(checkpoint):
    """An ignore entry matches with and without the suffix of a wrapper module.

    Handled in phyai_quant.matching.
    """
    for entry, name in (
        (f"{MLP}.down_proj.linear", "down_proj"),
        (f"{MLP}.up_proj", "up_proj.linear"),
    ):
        plan = load_quant_plan(checkpoint(compressed("NVFP4", ignore=[entry])))
        assert scheme(plan, f"{MLP}.{name}") is None


def test_case_02_an_entry_that_matches_nothing_is_named(checkpoint):
    """An ignore entry that matches no layer is warned of with its file and key.

    Handled in phyai_quant.plan.
    """
    directory = checkpoint(compressed("NVFP4", ignore=["vision.q_proj", f"{MLP}.down_proj"]))
    plan = load_quant_plan(directory)
    place = f"{directory / 'config.json'}: quantization_config.ignore: vision.q_proj"
    with pytest.warns(UserWarning, match="matches no layer of this model") as caught:
        warn_unmatched(plan, {f"{MLP}.down_proj": "Linear"})
    assert place in str(caught[0].message)
    assert len(caught) == 1


def test_case_04_a_layer_fused_from_ignored_leaves_is_ignored(checkpoint):
    """A layer fused from any number of ignored leaves is ignored.

    Handled in phyai_quant.plan.
    """
    leaves = [f"in_proj_{leaf}" for leaf in ("qkv", "g", "fa", "b")]
    for ignored in (leaves, ["in_proj_qkvgfab"]):
        names = [f"a.{name}" for name in ignored]
        plan = load_quant_plan(checkpoint(compressed("FP8", ignore=names)))
        assert scheme(plan, "a.in_proj_qkvgfab", legs=leaves) is None


@pytest.mark.parametrize("cache", ["FP8", {"num_bits": 8, "type": "float", "strategy": "tensor"}])
def test_case_05_a_config_for_the_cache_alone_quantizes_no_layer(checkpoint, cache):
    """A group without targets quantizes no layer, and the cache scheme beside it is kept.

    Handled in phyai_quant.importers.compressed_tensors.
    """
    group = {"targets": [], "weights": None, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    with pytest.warns(UserWarning, match="caches stay unquantized"):
        plan = load_quant_plan(checkpoint({**config, "kv_cache_scheme": cache}))
    assert (plan.rules, plan.default) == ((), None)
    assert plan.kv_cache.dtype == "fp8_e4m3"


def test_case_07_a_multimodal_prefix_hides_no_entry(checkpoint):
    """Skip lists match with and without the prefix of a multimodal model; BF16 never becomes FP8.

    Handled in phyai_quant.matching, phyai_quant.disk_checks.
    """
    entry = "model.language_model.layers.1.ple.key_proj"
    plan = load_quant_plan(checkpoint({**FP8, "ignored_layers": [entry]}))
    for name in (entry, "model.layers.1.ple.key_proj", "layers.1.ple.key_proj"):
        assert scheme(plan, name) is None
    other = "model.vision_model.layers.1.ple.key_proj"
    assert scheme(plan, other) is not None
    with pytest.raises(QuantConfigError, match=f"{other}.weight \\(BF16\\): not quantized, but"):
        check_quantized_layers({f"{other}.weight": "BF16"}, plan, {other: "Linear"})


def test_case_08_both_keys_of_the_skip_list_count(checkpoint):
    """Both spellings of the FP8 skip list count, as a union; null is empty.

    Handled in phyai_quant.importers.hf_fp8.
    """
    q_proj, o_proj = f"{ATTN}.q_proj", f"{ATTN}.o_proj"
    for config in (
        {"ignored_layers": [q_proj, o_proj], "modules_to_not_convert": None},
        {"ignored_layers": None, "modules_to_not_convert": [q_proj, o_proj]},
        {"ignored_layers": [q_proj], "modules_to_not_convert": [o_proj, q_proj]},
    ):
        plan = load_quant_plan(checkpoint({**FP8, **config}))
        assert scheme(plan, q_proj) is scheme(plan, o_proj) is None
        assert scheme(plan, f"{ATTN}.k_proj") is not None


@pytest.mark.parametrize("name", [".transformer.layers.31.mlp.fc2", "a..b", "a."])
def test_case_10_a_name_with_an_empty_segment_is_refused(checkpoint, name):
    """A layer name with an empty segment is refused in configs and in queries.

    Handled in phyai_quant.matching.
    """
    with pytest.raises(QuantConfigError, match="has an empty segment"):
        load_quant_plan(checkpoint({**FP8, "ignored_layers": [name]}))
    with pytest.raises(QuantConfigError, match="has an empty segment"):
        scheme(load_quant_plan(checkpoint(FP8)), name)


@pytest.mark.parametrize(("value", "ordered"), [(True, True), ("group", True), ("static", False)])
def test_case_13_activation_order_may_be_a_boolean(checkpoint, value, ordered):
    """Activation order may be spelled as a boolean.

    Handled in phyai_quant.importers.tensor_args.
    """
    args = {"num_bits": 4, "group_size": 128, "actorder": value}
    config = {**compressed(), "config_groups": {"g": {"weights": args}}}
    assert scheme(load_quant_plan(checkpoint(config)), "a.b").weight.act_order is ordered


def test_case_13_an_unknown_activation_order_lists_the_allowed_ones(checkpoint):
    """An unknown activation order is refused with the allowed ones.

    Handled in phyai_quant.importers.tensor_args.
    """
    args = {"num_bits": 4, "group_size": 128, "actorder": "sorted"}
    config = {**compressed(), "config_groups": {"g": {"weights": args}}}
    with pytest.raises(QuantConfigError, match="allowed: null, true, group, weight, static, dynam"):
        load_quant_plan(checkpoint(config))


def test_case_14_one_scale_and_a_group_size_contradict(checkpoint):
    """A scale for the tensor and a group size contradict each other; both fields are named.

    Handled in phyai_quant.importers.tensor_args.
    """
    args = {"num_bits": 8, "strategy": "tensor", "group_size": 128}
    config = {**compressed(), "config_groups": {"g": {"weights": args}}}
    with pytest.raises(QuantConfigError, match="strategy 'tensor' and group_size 128 contradict"):
        load_quant_plan(checkpoint(config))


@pytest.mark.parametrize("key", ["ignore", "exclude_modules"])
def test_case_17_exclusions_have_two_spellings(checkpoint, key):
    """ModelOpt exclusions count under both of their keys.

    Handled in phyai_quant.importers.modelopt.
    """
    inline = {"quant_method": "modelopt", "quant_algo": "NVFP4", key: ["lm_head"]}
    plan = load_quant_plan(checkpoint(inline))
    assert scheme(plan, "lm_head") is None
    assert scheme(plan, f"{MLP}.up_proj").weight.dtype == "nvfp4"


def test_case_19_the_inline_config_is_enough(checkpoint):
    """A ModelOpt config inside config.json is enough; one in each file must agree.

    Handled in phyai_quant.importers.registry.
    """
    inline = {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert scheme(load_quant_plan(checkpoint(inline)), "a.b").weight.dtype == "fp8_e4m3"
    with pytest.raises(QuantConfigError, match="contradict each other"):
        load_quant_plan(checkpoint(inline, modelopt(quant_algo="NVFP4")))


def test_case_22_one_listed_projection_quantizes_no_other(checkpoint):
    """One listed projection quantizes no other one beside it.

    Handled in phyai_quant.importers.modelopt.
    """
    listed = {f"{ATTN}.o_proj": {"quant_algo": "FP8"}}
    config = modelopt(quant_algo="MIXED_PRECISION", quantized_layers=listed)
    plan = load_quant_plan(checkpoint(standalone=config))
    assert scheme(plan, f"{ATTN}.o_proj") is not None
    assert scheme(plan, f"{ATTN}.qkv_proj") is None


def test_case_23_null_layers_are_no_layers(checkpoint):
    """A null list of quantized layers is an empty one.

    Handled in phyai_quant.importers.modelopt.
    """
    plan = load_quant_plan(checkpoint(standalone=modelopt(quant_algo="FP8", quantized_layers=None)))
    assert plan.rules == ()
    assert scheme(plan, "a.b").weight.dtype == "fp8_e4m3"
