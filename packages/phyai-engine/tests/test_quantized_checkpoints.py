"""Tiny π0.5 checkpoints, quantized by phyai-quant, loaded by the engine and run."""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from phyai.checkpoints import CheckpointError
from phyai.dispatch.config import KernelConfig
from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig, QuantizationConfig
from phyai.models.pi05.main_pi05 import PI05Args
from phyai.processing import Observation
from phyai_quant import (
    Granularity,
    Matcher,
    QDType,
    QuantConfigError,
    QuantPlan,
    QuantScheme,
    Rule,
    TensorQuant,
    use_quant_plan,
)
from phyai_quant.offline.quantize import quantize_checkpoint

TINY = Path(__file__).parent / "fixtures" / "pi05_tiny"
BODIES = r".*\.(language_model|gemma_expert\.model)\.layers\.\d+\.(self_attn|mlp)\..*"
LANGUAGE = "paligemma_with_expert.paligemma.model.language_model.layers"
BLOCK, CHANNEL, TENSOR = Granularity.BLOCK, Granularity.PER_CHANNEL, Granularity.PER_TENSOR


def weight(dtype, block=None, rotation=None, granularity=CHANNEL):
    micro = dtype in (QDType.NVFP4, QDType.MXFP4)
    kind = granularity if block is None else BLOCK
    return TensorQuant(dtype, kind, micro_scaled=micro, block_shape=block, rotation_group=rotation)


def tokens(dtype):
    return TensorQuant(dtype, CHANNEL, dynamic=True)


# scheme, the row that multiplies on a CPU, largest relative error of the normalized actions
CASES = {
    "fp8": (QuantScheme(weight(QDType.FP8_E4M3)), "torch.gemm.fp8_dequant", 0.06),
    "fp8_a8": (
        QuantScheme(weight(QDType.FP8_E4M3), tokens(QDType.FP8_E4M3)),
        "torch.gemm.fp8_dequant",
        0.08,
    ),
    "fp8_tensor": (
        QuantScheme(weight(QDType.FP8_E4M3, granularity=TENSOR), tokens(QDType.FP8_E4M3)),
        "torch.gemm.fp8_dequant",
        0.08,
    ),
    "fp8_block": (QuantScheme(weight(QDType.FP8_E4M3, (16, 16))), "torch.gemm.fp8_dequant", 0.12),
    "w8a16": (QuantScheme(weight(QDType.INT8)), "torch.gemm.int8_rows", 0.02),
    "w8a8": (QuantScheme(weight(QDType.INT8), tokens(QDType.INT8)), "torch.gemm.int8_rows", 0.03),
    "w8a16_g16": (QuantScheme(weight(QDType.INT8, (1, 16))), "torch.gemm.int_packed", 0.02),
    "w4a16_g16": (QuantScheme(weight(QDType.INT4, (1, 16))), "torch.gemm.int_packed", 0.4),
    "nvfp4": (QuantScheme(weight(QDType.NVFP4, (1, 16))), "torch.gemm.nvfp4_linear", 0.2),
    "convrot_int8": (
        QuantScheme(weight(QDType.INT8, rotation=16), tokens(QDType.INT8)),
        "piper.gemm.convrot_int8",
        0.03,
    ),
    "convrot_nvfp4": (
        QuantScheme(weight(QDType.NVFP4, (1, 16), rotation=16)),
        "torch.gemm.convrot_nvfp4",
        0.2,
    ),
}
MXFP4 = QuantScheme(weight(QDType.MXFP4, (1, 32)))


def plan_of(scheme, pattern=BODIES):
    return QuantPlan((Rule(Matcher("regex", pattern), scheme, source="policy entry"),))


def online(scheme):
    return QuantScheme(scheme.weight, scheme.input, online=True)


def build(directory, policy=None, *, merge=False):
    args = PI05Args(checkpoint_dir=directory)
    return Engine(
        EngineArgs(
            "pi05",
            args,
            EngineConfig(
                device=DeviceConfig("cpu", torch.float32),
                kernel=KernelConfig(policy_config=policy),
                quantization=QuantizationConfig(merge_checkpoint=merge),
            ),
        )
    )


def observe(engine):
    described = engine.describe()
    generator = np.random.default_rng(0)
    height, width = described["image_resolution"]
    shape = (height, width, 3)
    images = {n: generator.integers(0, 256, shape, dtype=np.uint8) for n in described["cameras"]}
    return Observation(images=images, state=np.zeros(described["state_dim"], np.float32), task="go")


def actions(engine):
    return engine.infer(observe(engine), seed=0, num_steps=2).normalized


def difference(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.fixture(scope="module")
def exact():
    engine = build(TINY)
    return engine.weight_bytes(), actions(engine)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """Returns the folder of a case; each is written once."""
    made = {}

    def write(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("quantized") / name
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                quantize_checkpoint(TINY, made[name], plan_of(CASES[name][0]))
        return made[name]

    return write


@pytest.mark.parametrize("name", CASES)
def test_quantize_load_and_run(name, quantized, exact):
    _, row, limit = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = build(quantized(name))
    found = actions(engine)
    assert engine.weight_bytes() < exact[0]
    assert 1e-5 < difference(found, exact[1]) < limit
    rows = {t.selected for t in engine.explain() if (t.op, t.role) == ("gemm", "language")}
    assert rows == {row}


@pytest.mark.parametrize("name", ["convrot_int8", "convrot_nvfp4"])
def test_quantizing_at_load_gives_the_numbers_of_the_checkpoint(name, quantized):
    scheme = CASES[name][0]
    with use_quant_plan(plan_of(online(scheme))):
        at_load = build(TINY)
    at_rest = build(quantized(name))
    assert np.array_equal(actions(at_load), actions(at_rest))


def test_mxfp4_needs_groups_of_32_and_names_the_layer(tmp_path, exact):
    with pytest.raises(QuantConfigError, match=r"layers\.0.*32"):
        quantize_checkpoint(TINY, tmp_path / "bad", plan_of(MXFP4))
    pattern = r".*language_model\.layers\.\d+\.mlp\.down_proj"
    quantize_checkpoint(TINY, tmp_path / "good", plan_of(MXFP4, pattern))
    engine = build(tmp_path / "good")
    assert 1e-4 < difference(actions(engine), exact[1]) < 0.2
    assert "torch.gemm.mxfp4_linear" in {trace.selected for trace in engine.explain()}


def edited(source, target, edit=lambda tensors: tensors, config=lambda config: config):
    """Copies a checkpoint with other tensors and another config."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    save_file(edit(load_file(file)), file)
    path = target / "config.json"
    path.write_text(json.dumps(config(json.loads(path.read_text()))))
    return target


def without_config(config):
    return {key: value for key, value in config.items() if key != "quantization_config"}


@pytest.mark.parametrize("name", CASES)
def test_nothing_loads_without_the_config_that_explains_it(name, quantized, tmp_path):
    def edit(tensors):
        return {key: tensor for key, tensor in tensors.items() if "comfy_quant" not in key}

    directory = edited(quantized(name), tmp_path / "bare", edit, without_config)
    with pytest.raises(QuantConfigError, match="declares no quantization"):
        build(directory)


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_codes_without_scales_are_refused_too(name, quantized, tmp_path):
    def edit(tensors):
        return {key: t for key, t in tensors.items() if not key.endswith("_scale")}

    directory = edited(quantized(name), tmp_path / "bare", edit, without_config)
    with pytest.raises(QuantConfigError, match="declares no quantization"):
        build(directory)
    directory = edited(quantized(name), tmp_path / "scaleless", edit)
    with pytest.raises(
        CheckpointError, match=r"missing:.*q_proj\.weight_scale|k_proj\.weight_scale"
    ):
        build(directory)


def test_an_ignored_layer_that_is_quantized_is_named(quantized, tmp_path):
    def ignore(config):
        config["quantization_config"]["ignore"] = ["re:.*expert.*down_proj"]
        return config

    directory = edited(quantized("w8a8"), tmp_path / "ignored", config=ignore)
    with pytest.raises(
        QuantConfigError, match=r"(?s)down_proj\.weight \(I8\).*config\.json.*ignore"
    ):
        build(directory)


def test_a_quantized_vector_is_refused(tmp_path):
    key = f"model.{LANGUAGE}.0.input_layernorm.weight"

    def edit(tensors):
        return tensors | {key: tensors[key].to(torch.int32)}

    directory = edited(TINY, tmp_path / "vector", edit)
    with pytest.raises(CheckpointError, match=r"input_layernorm\.weight: .*int32.*never quantized"):
        build(directory)


def test_scales_of_a_quantized_cache_need_a_config_that_declares_it(quantized, tmp_path):
    def edit(tensors):
        return tensors | {f"model.{LANGUAGE}.0.self_attn.k_scale": torch.ones(1)}

    def declare(config):
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
        config["quantization_config"]["kv_cache_scheme"] = scheme
        return config

    with pytest.raises(CheckpointError, match=r"unexpected:\n.*k_scale"):
        build(edited(quantized("w8a8"), tmp_path / "undeclared", edit))
    with pytest.warns(UserWarning, match="caches stay unquantized"):
        build(edited(quantized("w8a8"), tmp_path / "declared", edit, declare))


POLICY = {
    "quantization": {
        "rules": [
            {
                "match": {"glob": "*.vision_tower.*.mlp.*"},
                "weight": {"dtype": "int8", "granularity": "per_channel"},
            }
        ]
    }
}


def test_a_policy_replaces_the_config_and_leaves_no_quantized_tensor_unexplained(quantized):
    with pytest.raises(
        QuantConfigError, match=r"(?s)q_proj\.weight \(I8\): no rule of quantization"
    ):
        build(quantized("w8a8"), POLICY)


def test_a_policy_goes_over_the_config_when_merging(quantized, exact):
    engine = build(quantized("w8a8"), POLICY, merge=True)
    formats = engine.describe()["linear_formats"]
    assert set(formats) == {"bf16", "int8_per_channel_int8", "humming_raw_int8_a16_per_channel"}
    assert difference(actions(engine), exact[1]) < 0.03
    assert engine.config.quantization.merge_checkpoint


def test_merging_without_a_policy_is_the_config(quantized):
    engine = build(quantized("w8a8"), merge=True)
    assert set(engine.describe()["linear_formats"]) == {"bf16", "int8_per_channel_int8"}


def test_a_merged_rule_on_a_quantized_layer_is_refused(quantized):
    rule = POLICY["quantization"]["rules"][0] | {"match": {"glob": "*.language_model.*"}}
    with pytest.raises(QuantConfigError, match=r"already quantized, but .*expects an unquantized"):
        build(quantized("w8a8"), {"quantization": {"rules": [rule]}}, merge=True)


def test_the_policy_goes_before_the_plan_around_the_engine(exact):
    with use_quant_plan(plan_of(online(CASES["convrot_int8"][0]))):
        around = build(TINY)
        policy = build(TINY, POLICY)
    assert "convrot_int8_g16" in around.describe()["linear_formats"]
    assert set(policy.describe()["linear_formats"]) == {"bf16", "humming_raw_int8_a16_per_channel"}


def test_the_plan_around_the_engine_goes_before_the_config(quantized):
    with use_quant_plan(plan_of(CASES["w8a8"][0])):
        found = actions(build(quantized("w8a8")))
    assert np.array_equal(found, actions(build(quantized("w8a8"))))
    with use_quant_plan(QuantPlan()), pytest.raises(QuantConfigError, match="no rule of"):
        build(quantized("w8a8"))


def test_the_variable_switches_merging_on(quantized, monkeypatch):
    monkeypatch.setenv("PHYAI_MERGE_QUANTIZATION", "1")
    assert build(quantized("w8a8"), POLICY).config.quantization.merge_checkpoint
    monkeypatch.setenv("PHYAI_MERGE_QUANTIZATION", "sometimes")
    with pytest.raises(ValueError, match="PHYAI_MERGE_QUANTIZATION is 'sometimes'"):
        build(quantized("w8a8"))


def test_a_class_as_target_with_an_ignore_list_is_read_as_tools_write_it(quantized, tmp_path):
    def as_tools_write(config):
        section = config["quantization_config"]
        section["config_groups"]["group_0"]["targets"] = ["Linear"]
        section["ignore"] = ["re:.*vision_tower.*", "re:.*multi_modal_projector.*", "re:.*dense"]
        section["ignore"] += ["re:.*lm_head", "re:.*action_.*", "re:.*time_mlp_.*"]
        return config

    directory = edited(quantized("w8a8"), tmp_path / "by_class", config=as_tools_write)
    assert np.array_equal(actions(build(directory)), actions(build(quantized("w8a8"))))


def test_a_class_as_target_without_its_exceptions_names_the_dense_layers(quantized, tmp_path):
    def as_target(config):
        config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["Linear"]
        config["quantization_config"]["ignore"] = []
        return config

    directory = edited(quantized("w8a8"), tmp_path / "by_class", config=as_target)
    with pytest.raises(ValueError, match=r"(?s)float32.*int8|not quantized, but"):
        build(directory)
