"""Builders of tokenizers and checkpoints that the processing tests share."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from phyai.processing import PolicyProcessor

ALPHABET = [chr(code) for code in range(32, 127)] + ["\n", "é", "▁"]


@dataclass(frozen=True)
class Shape:
    family: str = "pi05"
    cameras: tuple[str, ...] = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    state_dim: int = 5
    action_dim: int = 4
    max_state_dim: int = 32
    max_action_dim: int = 32
    tokenizer_max_length: int = 200
    image_resolution: tuple[int, int] = (224, 224)
    empty_cameras: int = 0


def write_json(path: Path, value) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def write_tokenizer(path: Path, *, bos: str = "<bos>") -> Path:
    """One id per character; padding, truncation, BOS and EOS of the file must all be ignored."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.processors import TemplateProcessing

    names = ["<pad>", "<eos>", "<filler>", "<unk>", "<other>", bos]
    vocab = {token: index for index, token in enumerate([*names, *ALPHABET])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<unk>", bos])
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A <eos>", special_tokens=[(bos, vocab[bos]), ("<eos>", 1)]
    )
    tokenizer.enable_padding(length=300)
    tokenizer.enable_truncation(max_length=5)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def write_sentencepiece(path: Path, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(train_sentencepiece(**options))
    return path


@cache
def train_sentencepiece(**options) -> bytes:
    import io

    import sentencepiece

    words = ["Task: pick up the red block, State: 0 1 2 3 4 5 6 7 8 9;", "Action: place the cup -1"]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words * 20),
        model_writer=model,
        **{
            "vocab_size": 300,
            "hard_vocab_limit": False,
            "model_type": "unigram",
            "byte_fallback": True,
            "pad_id": 0,
            "eos_id": 1,
            "bos_id": 2,
            "unk_id": 3,
            "add_dummy_prefix": False,
            "remove_extra_whitespaces": False,
            "user_defined_symbols": ["\n"],
            "normalization_rule_name": "identity",
            "minloglevel": 2,
            **options,
        },
    )
    return model.getvalue()


def state_stats(dims: int = 5) -> dict[str, np.ndarray]:
    columns = np.arange(dims, dtype=np.float64)
    return {
        "mean": columns / 10,
        "std": 0.5 + columns / 4,
        "min": -2 - columns,
        "max": 3 + columns,
        "q01": -1 - columns / 3,
        "q99": 2 + columns / 7,
        "q10": -0.5 - columns / 5,
        "q90": 1 + columns / 9,
    }


def action_stats(dims: int = 4) -> dict[str, np.ndarray]:
    return {name: values * 3 + 0.25 for name, values in state_stats(dims).items()}


def write_state_file(path: Path, features: dict[str, dict[str, np.ndarray]]) -> None:
    tensors = {
        f"{feature}.{name}": torch.tensor(values, dtype=torch.float32)
        for feature, stats in features.items()
        for name, values in stats.items()
    }
    save_file(tensors, path)


def preprocessor_steps(index: int, mode: str = "QUANTILES") -> list[dict]:
    """The steps of a π0.5 checkpoint with the normaliser at `index`: 2, or 3 with relative step."""
    relative = {
        "registry_name": "relative_actions_processor",
        "config": {"enabled": False, "exclude_joints": ["gripper"], "action_names": None},
    }
    return [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        *([relative] if index == 3 else []),
        {
            "registry_name": "normalizer_processor",
            "config": {
                "eps": 1e-8,
                "features": {"observation.state": {"type": "STATE", "shape": [5]}},
                "norm_map": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode},
            },
            "state_file": f"policy_preprocessor_step_{index}_normalizer_processor.safetensors",
        },
        {"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {}},
        {
            "registry_name": "tokenizer_processor",
            "config": {
                "max_length": 200,
                "task_key": "task",
                "padding_side": "right",
                "padding": "max_length",
                "truncation": True,
                "tokenizer_name": "google/paligemma-3b-pt-224",
            },
        },
        {"registry_name": "device_processor", "config": {"device": "cuda", "float_dtype": None}},
    ]


def postprocessor_steps(mode: str = "QUANTILES", *, absolute: bool = False) -> list[dict]:
    return [
        {
            "registry_name": "unnormalizer_processor",
            "config": {
                "eps": 1e-8,
                "features": {"action": {"type": "ACTION", "shape": [4]}},
                "norm_map": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode},
            },
            "state_file": "post.safetensors",
        },
        {"registry_name": "absolute_actions_processor", "config": {"enabled": absolute}},
        {"registry_name": "device_processor", "config": {"device": "cpu"}},
    ]


@dataclass
class LeRobotCheckpoint:
    folder: Path
    pre: list[dict]
    post: list[dict]

    def step(self, name: str) -> dict:
        return next(s for s in (*self.pre, *self.post) if s["registry_name"] == name)

    def write(self) -> Path:
        for side, steps in (("pre", self.pre), ("post", self.post)):
            name = f"policy_{side}processor"
            write_json(self.folder / f"{name}.json", {"name": name, "steps": steps})
        return self.folder


@pytest.fixture
def lerobot(tmp_path):
    """Builds a LeRobot checkpoint folder; edit its steps, then `.write()` again."""

    def build(index: int = 2, mode: str = "QUANTILES", *, absolute: bool = False):
        features = {"observation.state": state_stats(), "action": action_stats()}
        pre = preprocessor_steps(index, mode)
        for step in pre:
            if "state_file" in step:
                write_state_file(tmp_path / step["state_file"], features)
        write_state_file(tmp_path / "post.safetensors", features)
        write_tokenizer(tmp_path / "tokenizer.json")
        checkpoint = LeRobotCheckpoint(tmp_path, pre, postprocessor_steps(mode, absolute=absolute))
        checkpoint.write()
        return checkpoint

    return build


@pytest.fixture
def openpi(tmp_path):
    """Builds an openpi checkpoint folder with statistics of the given widths."""

    def build(state: int, action: int, asset: str = "assets/trossen"):
        folder = tmp_path / "checkpoint"
        stats = {
            "state": {name: values.tolist() for name, values in state_stats(state).items()},
            "actions": {name: values.tolist() for name, values in action_stats(action).items()},
        }
        write_json(folder / asset / "norm_stats.json", {"norm_stats": stats})
        write_tokenizer(folder / "tokenizer.json")
        return folder

    return build


@pytest.fixture
def build():
    """The free builders of this module."""
    from types import SimpleNamespace

    return SimpleNamespace(
        Shape=Shape,
        write_json=write_json,
        write_tokenizer=write_tokenizer,
        write_sentencepiece=write_sentencepiece,
        write_state_file=write_state_file,
        state_stats=state_stats,
        action_stats=action_stats,
    )


@pytest.fixture
def processor(lerobot, build):
    return PolicyProcessor.from_checkpoint(lerobot().folder, build.Shape())
