"""The commands and the example with the real engine, on the tiny LeRobot checkpoint."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from phyai.cli.images import read_image
from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.models.pi05.main_pi05 import PI05Args
from phyai.processing import Observation

TESTS = Path(__file__).parents[1]
CHECKPOINT = TESTS / "fixtures" / "pi05_tiny"
EXAMPLE = TESTS.parents[2] / "examples" / "pi05" / "run_pi05.py"
STATE = (0.25, -0.5, 1.0, 0.0, 0.1)
HUMMING = """
schema: phyai.kernel/v1
rules:
  - id: humming-quantized-linear
    match: {op: gemm, quant.layout: humming}
    restrict_to: humming.gemm.w4a16
quantization:
  rules:
    - match: {glob: "*.mlp.*"}
      weight: {dtype: int4, block_shape: [1, 128]}
"""
CONVROT = """
schema: phyai.kernel/v1
quantization:
  rules:
    - match: {regex: '.*language_model\\.layers\\.\\d+\\.mlp\\.down_proj'}
      weight: {dtype: int8, granularity: per_channel, rotation_group: 64}
      input: {dtype: int8, granularity: per_channel, dynamic: true}
"""
pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture
def humming_policy(tmp_path):
    path = tmp_path / "humming.yaml"
    path.write_text(HUMMING)
    return path


@pytest.fixture
def run(phyai, picture):
    def call(*extra, state=STATE):
        return phyai(
            *("run", "pi05", "--checkpoint", CHECKPOINT, "--device", "cpu", "--steps", 1),
            *("--image", f"base_0_rgb={picture}", "--task", "pick up the block"),
            *("--state", ",".join(map(str, state))),
            *extra,
        )

    return call


def test_run_returns_what_the_engine_returns(run, picture, tmp_path):
    target = tmp_path / "chunk.npz"
    result = run("--seed", 5, "--json", "--out", target)
    assert result.code == 0, result.err
    engine = Engine(
        EngineArgs(
            plugin="pi05",
            plugin_args=PI05Args(CHECKPOINT),
            config=EngineConfig(DeviceConfig("cpu", torch.float32)),
        )
    )
    observation = Observation(
        {"base_0_rgb": read_image(picture)}, np.float32(STATE), "pick up the block"
    )
    chunk = engine.infer(observation, seed=5, num_steps=1)
    np.testing.assert_allclose(result.json["actions"], chunk.actions, rtol=1e-6)
    assert result.json["prompt"] == chunk.prompt
    assert result.json["preset"] == "lerobot"
    with np.load(target) as saved:
        np.testing.assert_array_equal(saved["normalized"], chunk.normalized)


def test_without_savings_the_actions_agree(run):
    lean, full = run("--json").json, run("--json", "--no-savings").json
    assert full["engine"]["savings"] != lean["engine"]["savings"]
    np.testing.assert_allclose(full["actions"], lean["actions"], rtol=1e-4, atol=1e-4)


def test_the_table_names_prompt_and_preset(run):
    result = run()
    assert "preset   lerobot" in result.out
    assert "prompt   Task: pick up the block, State: " in result.out
    assert result.err == ""


def test_an_unknown_camera_is_the_processing_error(run, picture):
    result = run("--image", f"base_0_rbg={picture}")
    assert result.code == 1
    assert "base_0_rbg" in result.err
    assert "base_0_rgb" in result.err


def test_a_state_of_the_wrong_width_is_the_processing_error(run):
    result = run(state=(1, 2))
    assert result.code == 1
    assert result.err.startswith("error: ")
    assert "5" in result.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--preset", "nonsense"], "nonsense"),
        (["--stats", "gone.json"], "gone.json"),
        (["--tokenizer", "gone.model"], "gone.model"),
        (["--kernel-config", "gone.yaml"], "gone.yaml"),
    ],
)
def test_bad_options_are_one_message(run, options, words):
    result = run(*options)
    assert result.code == 1
    assert result.err.startswith("error: ")
    assert words in result.err
    assert "Traceback" not in result.err


def test_a_folder_that_is_no_checkpoint_is_the_checkpoint_error(phyai, picture, tmp_path):
    result = phyai(
        *("run", "pi05", "--checkpoint", tmp_path, "--device", "cpu", "--task", "go"),
        *("--image", f"base_0_rgb={picture}"),
    )
    assert result.code == 1
    assert "no model.safetensors" in result.err


def test_a_humming_policy_that_does_not_fit_gives_the_reason(run, humming_policy):
    result = run("--kernel-config", humming_policy)
    assert result.code == 1
    assert "mlp.fc1: Humming cannot store int4 block[1,128]" in result.err
    assert "K = 32 is not a multiple of 128" in result.err
    assert result.out == ""


def test_explain_lists_every_call_site_of_the_chunk(phyai):
    result = phyai("explain", "--checkpoint", CHECKPOINT, "--device", "cpu", "--json")
    assert result.code == 0, result.err
    groups = result.json["groups"]
    assert sum(group["count"] for group in groups) == result.json["sites"]
    assert {"gemm", "rmsnorm", "adarmsnorm", "attention", "attention_paged", "embedding"} <= {
        group["op"] for group in groups
    }
    for group in groups:
        assert group["selected"]
        assert group["count"] == sum(shape["count"] for shape in group["shapes"])
        rejected = [row for row in group["candidates"] if not row["eligible"]]
        assert all(row["reason"] for row in rejected)


def test_explain_answers_for_an_absent_gpu(phyai, tmp_path):
    rule = "rules: [{id: expert, match: {op: attention_paged, role: expert, device.arch: sm90}, "
    policy = tmp_path / "policy.yaml"
    policy.write_text(rule + 'restrict_to: "*.attention_paged*"}]\n')
    result = phyai(
        *("explain", "--checkpoint", CHECKPOINT, "--device", "nvidia:sm90", "--json"),
        *("--op", "attention_paged", "--kernel-config", policy),
    )
    assert result.code == 0, result.err
    for group in result.json["groups"]:
        assert group["facts"]["device.arch"] == "sm90"
        assert group["facts"]["dtype.input"] == "bf16"
        assert group["matched_rules"] == (["expert"] if group["role"] == "expert" else [])


def test_explain_for_an_absent_gpu_uses_the_quantization_of_the_policy(phyai, tmp_path):
    policy = tmp_path / "convrot.yaml"
    policy.write_text(CONVROT)
    result = phyai(
        *("explain", "--checkpoint", CHECKPOINT, "--device", "nvidia:sm90", "--json"),
        *("--op", "gemm", "--kernel-config", policy),
    )
    assert result.code == 0, result.err
    formats = {group["facts"]["quant.format"] for group in result.json["groups"]}
    assert formats == {"bf16", "int8"}


@pytest.fixture
def run_example(monkeypatch, capsys):
    """Run the example as a script and return what it printed and its exit message."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--checkpoint", *map(str, arguments)])
        message = None
        try:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        except SystemExit as exit_:
            message = exit_.code
        return capsys.readouterr().out, message

    return run


def test_the_example_prints_shapes_timings_and_kernels(run_example):
    out, message = run_example(CHECKPOINT, "--device", "cpu", "--steps", "1")
    assert message is None
    assert "actions   (6, 4) float32" in out
    assert "warm-up   " in out
    assert out.count("run       ") == 3
    assert "gemm expert  ->  torch.gemm.bf16" in out
    assert "policy    none" in out


def test_the_example_takes_the_policy_of_the_variable(run_example, humming_policy, monkeypatch):
    monkeypatch.setenv("PHYAI_KERNEL_CONFIG", str(humming_policy))
    out, message = run_example(CHECKPOINT, "--device", "cpu")
    assert message.startswith("error: ")
    assert "Humming cannot store int4 block[1,128]" in message
    assert out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_the_example_refuses_an_absent_gpu(run_example):
    _, message = run_example(CHECKPOINT, "--device", "cuda")
    assert message.startswith("error: device target is 'cuda'")


def test_the_example_refuses_an_absent_checkpoint(run_example, tmp_path):
    _, message = run_example(tmp_path / "gone", "--device", "cpu")
    assert message.startswith(f"error: {tmp_path / 'gone'} ")


def test_pictures_of_phones_reach_the_model(run, tmp_path):
    photo = tmp_path / "photo.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (640, 480), (200, 30, 30)).save(photo, exif=exif)
    result = run("--image", f"left_wrist_0_rgb={photo}", "--json")
    assert result.code == 0, result.err
    assert np.isfinite(result.json["actions"]).all()
