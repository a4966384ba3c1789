"""The parts of the LeRobot scripts that need no LeRobot."""

import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "packages/phyai-engine/tests/fixtures"
MAX_FIXTURE_BYTES = 2_000_000
BOS = 2


@pytest.fixture
def script(monkeypatch):
    """Imports a module of the scripts folder."""
    import importlib

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.fixture
def checkpoint(tmp_path):
    target = tmp_path / "checkpoint"
    shutil.copytree(FIXTURES / "pi05_tiny", target)
    return target


def edit_tensors(checkpoint, edit):
    path = checkpoint / "model.safetensors"
    save_file(edit(load_file(path)), path)


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_sizes_are_read_from_the_tensors(script, family):
    expected = script("golden_policies").SIZES[family]
    assert script("lerobot_tiny").read_sizes(FIXTURES / f"{family}_tiny") == expected


def test_sizes_are_read_without_prefix_and_vision_level(script, checkpoint):
    edit_tensors(
        checkpoint,
        lambda tensors: {
            name.removeprefix("model.").replace(".vision_model.", "."): value
            for name, value in tensors.items()
        },
    )
    assert script("lerobot_tiny").read_sizes(checkpoint) == script("golden_policies").SIZES["pi05"]


def test_a_missing_tensor_is_named(script, checkpoint):
    tiny = script("lerobot_tiny")
    name = "model.paligemma_with_expert.gemma_expert.lm_head.weight"
    edit_tensors(checkpoint, lambda tensors: {key: tensors[key] for key in tensors if key != name})
    with pytest.raises(tiny.CheckpointMismatchError, match=r"gemma_expert\.lm_head\.weight"):
        tiny.read_sizes(checkpoint)


def test_a_truncated_file_is_named(script, checkpoint):
    tiny = script("lerobot_tiny")
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(tiny.CheckpointMismatchError, match=r"model\.safetensors"):
        tiny.read_sizes(checkpoint)


def test_vision_heads_come_from_the_sidecar_or_the_published_width(script, checkpoint):
    tiny = script("lerobot_tiny")
    sidecar = checkpoint / "phyai_config.json"
    sidecar.write_text(json.dumps({"vision_num_heads": 8}))
    assert tiny.read_sizes(checkpoint).vision.num_heads == 8
    sidecar.unlink()
    with pytest.raises(tiny.CheckpointMismatchError, match="vision_num_heads"):
        tiny.read_sizes(checkpoint)
    patch = "model.paligemma_with_expert.paligemma.model.vision_tower.vision_model.embeddings"
    wide = {f"{patch}.patch_embedding.weight": torch.zeros(1152, 3, 14, 14)}
    edit_tensors(checkpoint, lambda tensors: tensors | wide)
    assert tiny.read_sizes(checkpoint).vision.num_heads == 16


def test_unknown_families_are_refused(script):
    tiny = script("lerobot_tiny")
    with pytest.raises(tiny.CheckpointMismatchError, match=r"'act'.*pi05, pi0"):
        tiny.policy_class("act")


def test_the_tokenizer_can_be_trained_again(script):
    from sentencepiece import SentencePieceProcessor

    trained = SentencePieceProcessor(model_proto=script("tiny_tokenizer").train_sentencepiece())
    stored = SentencePieceProcessor(model_file=str(FIXTURES / "pi05_tiny/tokenizer.model"))
    text = "Task: stack the café cups, State: 128 -1 255;\nAction: "
    assert trained.encode(text) == stored.encode(text)
    assert stored.decode(stored.encode(text)) == text
    assert (stored.pad_id(), stored.eos_id(), stored.bos_id(), stored.unk_id()) == (0, 1, BOS, 3)


@pytest.mark.parametrize("shift", [0.0, 1e-3])
def test_comparison_tells_equal_from_different(script, tmp_path, shift):
    stored = load_file(FIXTURES / "pi05_tiny/processing.safetensors")
    case = {
        name.removeprefix("wide."): value
        for name, value in stored.items()
        if name.startswith("wide.")
    }
    statistics = load_file(
        FIXTURES / "pi05_tiny/policy_postprocessor_step_0_unnormalizer_processor.safetensors"
    )
    low, high = statistics["action.q01"], statistics["action.q99"]
    first = (case["chunk_actions"][:, :1] - low[:1]) / (high - low)[:1] * 2 - 1
    chunk = {name: value for name, value in case.items() if name.startswith("image.")}
    chunk |= {"state": case["state"], "noise": case["chunk_noise"]}
    chunk |= {"actions": case["chunk_actions"], "normalized_actions": first + shift}
    path = tmp_path / "chunk.safetensors"
    save_file(chunk, path, metadata={"task": "pick up the red block"})
    compare = script("compare_with_lerobot").compare
    assert compare(FIXTURES / "pi05_tiny", path, 1e-4) == (shift == 0.0)


def test_fixtures_stay_small():
    assert sum(path.stat().st_size for path in FIXTURES.rglob("*")) < MAX_FIXTURE_BYTES
