"""Quantization configs."""

import math

import pytest
import torch
from safetensors.torch import save_file

from phyai.checkpoints import load_into
from phyai.layers import Linear
from phyai_quant import QuantConfigError, load_quant_plan, use_quant_plan
from phyai_quant.checkpoint import check_unquantized_dtypes
from phyai_quant.cli.app import run
from phyai_quant.disk_checks import check_quantized_layers
from phyai_quant.plan import warn_unmatched

ATTN = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def compressed(*presets, **values):
    groups = {"config_groups": {preset: ["Linear"] for preset in presets}}
    return {"quant_method": "compressed-tensors", **groups, **values}


def modelopt(**quantization):
    return {"producer": {"name": "modelopt"}, "quantization": quantization}


def scheme(plan, name, **kwargs):
    return plan.resolve(name, "Linear", **kwargs)


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


def test_case_11_quantized_tensors_without_a_config_are_refused(checkpoint):
    """FP8 tensors in a checkpoint that declares no quantization are an error.

    Handled in phyai_quant.disk_checks.
    """
    plan = load_quant_plan(checkpoint(use_fp8_experts=True))
    assert plan is None
    for name in ("mlp.experts.0.up_proj.weight", "mlp.experts.gate_up_proj"):
        with pytest.raises(QuantConfigError, match="the checkpoint declares no quantization"):
            check_unquantized_dtypes({name: "F8_E4M3", "norm.weight": "BF16"}, plan)


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


def test_case_16_an_unquantized_expert_outside_the_ignore_list_is_named(checkpoint):
    """A BF16 expert that the config calls quantized is named with the rule that says so.

    Handled in phyai_quant.disk_checks.
    """
    plan = load_quant_plan(checkpoint(compressed("FP8_DYNAMIC")))
    experts = {f"{MLP}.experts.{index}.up_proj": "Linear" for index in range(3)}
    dtypes = dict.fromkeys((f"{name}.weight" for name in experts), "F8_E4M3")
    dtypes[f"{MLP}.experts.1.up_proj.weight"] = "BF16"
    with pytest.raises(QuantConfigError) as error:
        check_quantized_layers(dtypes, plan, experts)
    assert "experts.1.up_proj.weight (BF16)" in str(error.value)
    assert "config_groups.FP8_DYNAMIC.targets: Linear" in str(error.value)
    assert "experts.0" not in str(error.value)


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


def test_case_20_an_excluded_head_that_is_quantized_is_a_contradiction(checkpoint):
    """A head that is excluded and stored quantized is refused with tensor, rule and file.

    Handled in phyai_quant.disk_checks.
    """
    plan = load_quant_plan(
        checkpoint(standalone=modelopt(quant_algo="NVFP4", exclude_modules=["lm_head"]))
    )
    tensors = {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"}
    with pytest.raises(QuantConfigError) as error:
        check_unquantized_dtypes(
            {f"lm_head.{name}": dtype for name, dtype in tensors.items()}, plan
        )
    assert "lm_head.weight (U8): kept unquantized by name 'lm_head'" in str(error.value)
    assert "hf_quant_config.json: quantization.exclude_modules: lm_head" in str(error.value)
    assert "lm_head.weight_scale_2" in str(error.value)


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


def test_case_25_a_scale_of_a_layer_without_a_rule_is_named(checkpoint):
    """A scale of a layer that no rule quantizes is named with the rule's file.

    Handled in phyai_quant.disk_checks.
    """
    directory = checkpoint({**compressed(), "config_groups": {"FP8": [f"{MLP}.up_proj"]}})
    with pytest.raises(QuantConfigError) as error:
        check_unquantized_dtypes(
            {f"{MLP}.down_proj.weight_scale": "F32"}, load_quant_plan(directory)
        )
    assert f"{MLP}.down_proj.weight_scale (F32): no rule of {directory}" in str(error.value)


def test_case_26_an_infinite_scale_of_the_input_is_reported(checkpoint, capsys):
    """The validation command reports an infinite input scale; building the plan does not read it.

    Handled in phyai_quant.offline.checks, phyai_quant.cli.validate.
    """
    directory = checkpoint(compressed("NVFP4"))
    experts = [f"{MLP}.experts.{index}.up_proj" for index in range(3)]
    tensors = {}
    for name in experts:
        tensors[f"{name}.weight_packed"] = torch.zeros(16, 16, dtype=torch.uint8)
        tensors[f"{name}.weight_scale"] = torch.ones(16, 2).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_global_scale"] = torch.ones(1)
        tensors[f"{name}.input_global_scale"] = torch.ones(1)
    tensors[f"{experts[1]}.input_global_scale"] = torch.tensor([math.inf])
    save_file(tensors, directory / "model.safetensors")
    check_unquantized_dtypes({"a.b.input_global_scale": "F32"}, load_quant_plan(directory))
    assert run(["validate", str(directory)]) == 1
    errors = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error")]
    assert len(errors) == 1, errors
    assert f"{experts[1]}.input_global_scale: 1 of 1 scales are infinite" in errors[0]


@pytest.mark.parametrize("group", [32, 128])
def test_case_28_a_group_that_does_not_divide_the_features_is_named(checkpoint, group):
    """A group size that does not divide the input features is refused with the layer and the rule.

    Handled in phyai_quant.specs.int_scales, phyai.layers.linear.
    """
    args = {"num_bits": 4, "group_size": group}
    config = {**compressed(), "config_groups": {"g": {"targets": ["Linear"], "weights": args}}}
    directory = checkpoint({**config, "format": "pack-quantized"})
    with use_quant_plan(load_quant_plan(directory)):
        Linear(1152, 4304, prefix=f"{MLP}.fc1")
        with pytest.raises(QuantConfigError) as error:
            Linear(4304, 1152, prefix=f"{MLP}.fc2")
    assert f"{MLP}.fc2: K = 4304 is not a multiple of the group size {group}" in str(error.value)
    assert f"decided by module_cls 'Linear' -> weight int4 block[1,{group}]" in str(error.value)
    assert f"{directory / 'config.json'}: quantization_config.config_groups" in str(error.value)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [64, 72, 192])
def test_case_29_w4a16_with_few_rows_equals_its_dequantized_weight(checkpoint, rows, device):
    """A 4-bit product with 64 outputs, or no multiple of 128, equals that of the dense weight.

    Handled in phyai_quant.specs.int_packed, phyai.layers.linear, phyai.kernels.gemm.
    """
    columns, group = 128, 64
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    config = {**compressed(), "config_groups": {"g": {"targets": ["Linear"], "weights": args}}}
    plan = load_quant_plan(checkpoint({**config, "format": "pack-quantized"}))
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (rows, columns), generator=generator)
    scales = torch.rand(rows, columns // group, generator=generator) + 0.5
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for k in range(columns):  # offset-binary, lowest k in the lowest bits
        words[:, k // 8] |= (codes[:, k] + 8) << (4 * (k % 8))
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    tensors = {"weight_packed": words, "weight_scale": scales}
    tensors["weight_shape"] = torch.tensor([rows, columns])

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with use_quant_plan(plan):
        layer = Linear(columns, rows, prefix="a.b", params_dtype=dtype, device=device)
    readers = {f"a.b.{name}": lambda tensor=tensor: tensor for name, tensor in tensors.items()}
    load_into(layer, readers, source="a checkpoint")
    expected = codes.float() * scales.repeat_interleave(group, 1)
    if device == "cpu":
        assert torch.equal(layer.spec.dequantize_weight(layer), expected)
    found = layer(torch.eye(columns, dtype=dtype, device=device)).cpu().float()
    torch.testing.assert_close(found, expected.T, rtol=0 if device == "cpu" else 0.02, atol=1e-6)
