"""Checkpoints that the example package reads, and its errors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from typer.testing import CliRunner

from phyai.checkpoints import CheckpointReader, load_into
from phyai.layers import Leg, Linear
from phyai_quant import QuantConfigError, load_quant_plan, use_quant_plan
from phyai_quant.checkpoint import check_unquantized_dtypes

ROOT = Path(__file__).parents[1]
CONFIG = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": None}
LEGS = (Leg("q_proj", 6, "q"), Leg("k_proj", 3, "k"), Leg("v_proj", 2, "v"))


@pytest.fixture
def installed(install_package):
    install_package(ROOT)


def write(directory, config=CONFIG, **changes):
    """A checkpoint with one fused layer and an unquantized head; returns the dense weights."""
    generator = torch.Generator().manual_seed(0)
    dense, tensors = {}, {"lm_head.weight": torch.randn(4, 32, generator=generator)}
    for leg in LEGS:
        weight = torch.randn(leg.width, 32, generator=generator)
        largest = weight.abs().amax(1)
        codes = (weight * (127 / largest)[:, None]).round().to(torch.int8)
        dense[leg.name] = codes.double() * largest.double()[:, None] / 127
        name = f"model.layers.0.self_attn.{leg.name}"
        tensors |= {
            f"{name}.weight": codes,
            f"{name}.SCB": largest,
            f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
        }
    directory.mkdir()
    save_file(tensors | changes, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    return torch.cat([dense[leg.name] for leg in LEGS])


def load(directory):
    reader = CheckpointReader(directory)
    plan = load_quant_plan(directory)
    check_unquantized_dtypes(reader.dtypes, plan)
    with use_quant_plan(plan):
        model = torch.nn.ModuleList(
            [
                Linear(32, LEGS, prefix="model.layers.0.self_attn.qkv_proj"),
                Linear(32, 4, prefix="lm_head"),
            ]
        )
    load_into(model, reader.tensors(), source=str(directory))
    return model


def test_a_checkpoint_loads_and_runs(installed, tmp_path):
    weight = write(tmp_path / "checkpoint")
    layer, head = load(tmp_path / "checkpoint")
    assert type(layer.spec).__name__ == "LlmInt8Spec"
    assert head.spec.spec_id == "bf16"
    torch.testing.assert_close(
        layer.spec.dequantize_weight(layer).double(), weight, atol=0, rtol=2e-7
    )
    x = torch.randn(5, 32)
    expected = functional.linear(x.double(), weight)
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-5, rtol=1e-5)


def test_other_checkpoints_are_stored_as_before(installed):
    from phyai_quant import QuantScheme, TensorQuant, materialize

    spec = materialize(QuantScheme(TensorQuant("int8", "per_channel")))
    assert type(spec).__name__ == "Int8Spec"


def test_without_the_package_the_config_is_refused(tmp_path):
    write(tmp_path / "checkpoint")
    with pytest.raises(QuantConfigError, match="quant_method 'bitsandbytes' is unknown"):
        load_quant_plan(tmp_path / "checkpoint")


def test_listed_modules_stay_unquantized(installed, tmp_path):
    config = CONFIG | {"llm_int8_skip_modules": ["self_attn", "model.layers.1"]}
    write(tmp_path / "checkpoint", config)
    plan = load_quant_plan(tmp_path / "checkpoint")
    assert plan.resolve("model.layers.1.mlp.down_proj", "Linear") is None
    assert plan.resolve("lm_head", "Linear").stored_by == "llm-int8"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"load_in_8bit": False}, "load_in_8bit: only 8-bit checkpoints are read here"),
        ({"load_in_8bit": "yes"}, "load_in_8bit: 'yes' is not allowed"),
        ({"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight: True is not supported"),
        ({"llm_int8_skip_modules": "lm_head"}, "is not a list of non-empty strings"),
    ],
)
def test_configs_that_cannot_be_honoured_are_refused(installed, tmp_path, change, message):
    write(tmp_path / "checkpoint", CONFIG | change)
    with pytest.raises(QuantConfigError, match=message):
        load_quant_plan(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("weight_format", torch.tensor(2, dtype=torch.uint8), "weight_format is 2; allowed: 0"),
        ("weight", torch.zeros(3, 32), "float32"),
        ("SCB", torch.ones(4), "weight_scale"),
    ],
)
def test_bad_tensors_are_refused(installed, tmp_path, name, tensor, message):
    write(tmp_path / "checkpoint", **{f"model.layers.0.self_attn.k_proj.{name}": tensor})
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "checkpoint")


def test_a_missing_scale_has_the_name_that_it_has_in_the_checkpoint(installed, tmp_path):
    write(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.self_attn.v_proj.SCB"]
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"missing:\n    model\.layers\.0\.self_attn\.v_proj\.SCB"):
        load(tmp_path / "checkpoint")


def test_the_command_of_the_readme_shows_the_plan(installed, tmp_path):
    from phyai_quant.cli.app import app

    write(tmp_path / "checkpoint")
    command = "phyai-quant plan path/to/checkpoint"
    assert command in (ROOT / "README.md").read_text()
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "checkpoint")])
    assert result.exit_code == 0, result.output
    assert "stored_by: llm-int8" in result.output
