"""The presets of π0.5 on a checkpoint of the real size: a header without data behind it."""

import json
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from phyai.cli.recording import record_shapes
from phyai.dispatch import build_catalog, load_policy

TINY = Path(__file__).parents[1] / "fixtures" / "pi05_tiny"
POLICIES = Path(__file__).parents[4] / "examples" / "pi05" / "kernel_policies"
QUICK = {"convrot_int8", "humming_w4a16", "nvfp4"}
PRESETS = [
    pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow)
    for path in sorted(POLICIES.glob("*.yaml"))
    if not path.stem.startswith("pi05_h200")
]
# Tiny size to real size, by part of the model; other sizes are the same in both.
REAL = {
    "vision_tower": {32: 1152, 48: 4304, 4: 256},
    "multi_modal_projector": {32: 1152, 48: 2048},
    "paligemma.": {48: 2048, 64: 16384, 128: 2048, 16: 256, 320: 257152},
    "gemma_expert": {32: 1024, 96: 3072, 48: 4096, 128: 2048, 16: 256, 320: 257152},
    "": {32: 1024, 8: 32},
}
LAYERS = {"vision_tower": 27, "paligemma.": 18, "gemma_expert": 18}


def part_of(name, table):
    return next(table[part] for part in table if part in name)


def real_shapes():
    """Yield names and shapes of the real checkpoint, from those of the tiny one."""
    with safe_open(TINY / "model.safetensors", "pt") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    for name, tiny in shapes.items():
        sizes = part_of(name, REAL)
        shape = [sizes.get(size, size) for size in tiny]
        if not re.search(r"\.layers\.\d+\.", name):
            yield name, shape
        elif ".layers.0." in name:
            for layer in range(part_of(name, LAYERS)):
                yield name.replace(".layers.0.", f".layers.{layer}."), shape


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full") / "pi05"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name in TINY.glob("policy_*.safetensors"):
        shutil.copy(name, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"image_resolution": [224, 224], "chunk_size": 50, "n_action_steps": 50}
    config |= {"max_state_dim": 32, "max_action_dim": 32, "tokenizer_max_length": 200}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "phyai_config.json").write_text('{"vision_num_heads": 16}')
    header, end = {}, 0
    for name, shape in real_shapes():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


@pytest.fixture(autouse=True)
def _with_libraries(monkeypatch):
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)
    monkeypatch.setattr("phyai_quant.specs.humming.find_spec", lambda name: object())


@pytest.fixture(scope="module")
def recordings():
    return {}


@pytest.fixture
def _one_recording(recordings, monkeypatch):
    """Follows the shapes once: no preset names a norm, so all make the same calls."""

    def remembered(folder, dtype, target):
        key = (folder, dtype, target.device)
        if key not in recordings:
            recordings[key] = record_shapes(folder, dtype, target)
        return recordings[key]

    monkeypatch.setattr("phyai.cli.explain_model.record_shapes", remembered)


@pytest.mark.usefixtures("_one_recording")
@pytest.mark.parametrize("policy", PRESETS)
def test_every_preset_serves_every_call_on_sm90(phyai, checkpoint, policy):
    result = phyai(
        *("explain", "--model", checkpoint, "--policy", policy),
        *("--device", "nvidia:sm90", "--mode", "capture", "--json"),
    )
    assert result.code == 0, result.err
    report = result.json
    assert report["problems"] == []
    quantized = [entry for entry in report["layers"] if entry["scheme"] != "unquantized"]
    # Four projections of 18 layers of two decoders; the language model's last layer keeps its keys
    # and values only.
    assert len(quantized) == 4 * 18 * 2 - 3
    catalog = build_catalog()
    rules = {rule.id: rule for rule in load_policy(policy, catalog=catalog).rules}
    names = {entry["name"] for entry in quantized}
    products = [group for group in report["groups"] if group["op"] == "gemm"]
    groups = [group for group in products if names & set(group["modules"])]
    assert sum(group["count"] for group in groups) == len(quantized)
    for group in groups:
        (decided,) = group["matched_rules"]
        assert group["selected"] in rules[decided].candidates(catalog)


@pytest.mark.parametrize(("policy", "quantized"), [("pi05_h200", 0), ("pi05_h200_fast", 52)])
def test_tuned_presets_serve_every_call_on_sm90(phyai, checkpoint, policy, quantized):
    result = phyai(
        *("explain", "--model", checkpoint, "--policy", POLICIES / f"{policy}.yaml"),
        *("--device", "nvidia:sm90", "--mode", "capture", "--json"),
    )
    assert result.code == 0, result.err
    assert result.json["problems"] == []
    layers = [entry for entry in result.json["layers"] if entry["scheme"] != "unquantized"]
    assert len(layers) == quantized


def test_no_memory_is_reserved_for_the_weights(phyai, checkpoint, monkeypatch):
    from phyai_quant.specs import humming_staging

    reserved = []

    def spy(*arguments):
        raw = empty_raw(*arguments)
        reserved.extend(tensor.device.type for tensor in raw.values())
        return raw

    empty_raw = humming_staging.empty_raw
    monkeypatch.setattr(humming_staging, "empty_raw", spy)
    result = phyai(
        *("explain", "--model", checkpoint, "--policy", POLICIES / "humming_w4a16.yaml"),
        *("--device", "nvidia:sm90", "--op", "rope"),
    )
    assert result.code == 0
    assert set(reserved) == {"meta"}


def test_an_older_gpu_is_told_what_it_cannot_run(phyai, checkpoint):
    policy = POLICIES / "humming_fp8_e4m3_a8.yaml"
    result = phyai(
        *("explain", "--model", checkpoint, "--policy", policy),
        *("--device", "nvidia:sm80", "--op", "gemm"),
    )
    assert result.code == 1
    assert "141 layers cannot be stored" in result.err or "have no kernel" in result.err
    assert "sm80" in result.out
