"""Checkpoints against their quantization configs."""

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

from .quantization_values import MLP, compressed, modelopt

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_case_11_quantized_tensors_without_a_config_are_refused(checkpoint):
    """FP8 tensors in a checkpoint that declares no quantization are an error.

    Handled in phyai_quant.disk_checks.
    """
    plan = load_quant_plan(checkpoint(use_fp8_experts=True))
    assert plan is None
    for name in ("mlp.experts.0.up_proj.weight", "mlp.experts.gate_up_proj"):
        with pytest.raises(QuantConfigError, match="the checkpoint declares no quantization"):
            check_unquantized_dtypes({name: "F8_E4M3", "norm.weight": "BF16"}, plan)


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
