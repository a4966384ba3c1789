"""Checkpoints of which a layer is stored in 16 bits although their config calls it quantized."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phyai.checkpoints import CheckpointReader
from phyai.layers import UnusedLinear
from phyai.models.cosmos3.loading import load_transformer
from phyai.models.pi05.loading import load_pi05
from phyai.quantization import resolve_quant_plan
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

TESTS = Path(__file__).resolve().parents[1]
CHANNEL, BLOCK = Granularity.PER_CHANNEL, Granularity.BLOCK
PI05_LAYERS = "model.paligemma_with_expert.paligemma.model.language_model.layers"
SCHEMES = {
    "fp8": QuantScheme(TensorQuant(QDType.FP8_E4M3, CHANNEL)),
    "int4": QuantScheme(TensorQuant(QDType.INT4, BLOCK, block_shape=(1, 16))),
}


class Family:
    """How a family is quantized, edited and loaded.

    Args:
        source: folder of an unquantized checkpoint.
        rule: expression for the layers to quantize.
        load: loads a folder.
        attention: attention of a layer as the files name it.
        legs: its query, key and value projections.
    """

    def __init__(self, source, rule, load, attention, legs):
        self.source, self.load = source, load
        self.rule = Matcher("regex", rule)
        self.legs = [f"{attention}.{leg}" for leg in legs]

    def quantized(self, folder, scheme, dense):
        """Writes a quantized copy in which the layers `dense` are those of the source, in bf16."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantize_checkpoint(self.source, folder, QuantPlan((Rule(self.rule, scheme),)))
        wanted = {f"{layer}.weight" for layer in dense}
        values = {}
        for file in self.source.glob("*.safetensors"):
            values |= {name: t for name, t in load_file(file).items() if name in wanted}
        assert set(values) == wanted
        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            held = {name for name in tensors if name.rpartition(".")[0] in dense}
            kept = {name: tensor for name, tensor in tensors.items() if name not in held}
            layers = {name.rpartition(".")[0] for name in held}
            kept |= {f"{layer}.weight": values[f"{layer}.weight"].bfloat16() for layer in layers}
            save_file(kept, file)
        index = next(iter(folder.glob("*.index.json")), None)
        if index is not None:
            found = {n: f.name for f in folder.glob("*.safetensors") for n in load_file(f)}
            index.write_text(json.dumps({"weight_map": found}))
        return folder

    def loaded(self, folder):
        with use_quant_plan(resolve_quant_plan(folder)):
            return self.load(folder)


FAMILIES = {
    "pi05": Family(
        TESTS / "fixtures" / "pi05_tiny",
        r".*language_model\.layers\.\d+\.(self_attn|mlp)\..*",
        load_pi05,
        f"{PI05_LAYERS}.0.self_attn",
        ("q_proj", "k_proj", "v_proj"),
    ),
    "cosmos3": Family(
        TESTS / "models" / "cosmos3" / "fixtures" / "transformer_qwen",
        r"layers\.\d+\.(self_attn|mlp|mlp_moe_gen)\..*",
        load_transformer,
        "layers.0.self_attn",
        ("to_q", "to_k", "to_v"),
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_leg_in_16_bits_is_named_with_the_rule_before_anything_is_read(
    family, scheme, tmp_path, monkeypatch
):
    dense = family.legs[1]
    folder = family.quantized(tmp_path / "out", SCHEMES[scheme], [dense])
    read = []
    get = CheckpointReader.get
    monkeypatch.setattr(
        CheckpointReader, "get", lambda self, name, *a: read.append(name) or get(self, name, *a)
    )
    with pytest.raises(QuantConfigError) as error:
        family.loaded(folder)
    text = str(error.value)
    name = dense.removeprefix("model.")
    assert f"\n  {name}.weight (BF16): not quantized, but name" in text
    assert f"weight {SCHEMES[scheme].weight.dtype}" in text
    assert f"{folder / 'config.json'}: quantization_config.config_groups.group_0.targets: " in text
    assert text.count("BF16") == 1
    assert "take out entries that name them alone, or add them to its ignore list" in text
    # Packed codes have their shape in a tensor of its own.
    assert [name for name in read if not name.endswith(".weight_shape")] == []


@pytest.mark.parametrize("step", ["take out", "ignore"])
def test_what_the_error_asks_for_helps(family, step, tmp_path):
    folder = family.quantized(tmp_path / "out", SCHEMES["fp8"], family.legs)
    with pytest.raises(QuantConfigError) as error:
        family.loaded(folder)
    assert str(error.value).count("(BF16): not quantized") == 3
    file = folder / "config.json"
    config = json.loads(file.read_text())
    section = config["quantization_config"]
    (group,) = section["config_groups"].values()
    if step == "take out":
        group["targets"] = [name for name in group["targets"] if name not in family.legs]
    else:
        group["targets"] = [f"re:.*{family.rule.pattern}"]
        section["ignore"] = family.legs
    file.write_text(json.dumps(config))
    assert family.loaded(folder) is not None


def test_a_fused_tensor_in_16_bits_is_named(tmp_path):
    family, mlp = FAMILIES["pi05"], f"{PI05_LAYERS}.1.mlp"
    legs = [f"{mlp}.{leg}_proj" for leg in ("gate", "up")]
    folder = family.quantized(tmp_path / "out", SCHEMES["fp8"], legs)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    fused = torch.cat([tensors.pop(f"{leg}.weight") for leg in legs])
    save_file(tensors | {f"{mlp}.gate_up_proj.weight": fused}, file)
    with pytest.raises(QuantConfigError, match=r"1\.mlp\.gate_up_proj\.weight \(BF16\): not"):
        family.loaded(folder)


def test_layers_that_are_not_computed_may_hold_anything(tmp_path):
    family = FAMILIES["pi05"]
    whole = family.loaded(family.quantized(tmp_path / "whole", SCHEMES["fp8"], []))
    unused = [module.name for module in whole.modules() if isinstance(module, UnusedLinear)]
    dense = [f"model.{name}" for name in unused if family.rule.matches(name)]
    assert dense
    assert family.loaded(family.quantized(tmp_path / "out", SCHEMES["fp8"], dense)) is not None
