"""Write a checkpoint folder in LeRobot's layout: weights, processors, statistics, tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from phyai.models.pi05 import keys
from phyai.models.pi05.config import PI05Config
from phyai.models.pi05.sizes import SIDECAR
from reach.chunks import ACTION_STEPS
from reach.normalisation import ACTION, STATE, Statistics
from reach.sizes import EMBEDDING, tensor_shapes
from reach.tokenizer import save_tokenizer

PREPROCESSOR_STATE = "policy_preprocessor_step_3_normalizer_processor.safetensors"
POSTPROCESSOR_STATE = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
_EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
_NORMALIZATION = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}


def export_checkpoint(
    directory: Path,
    tensors: Mapping[str, Tensor],
    config: PI05Config,
    statistics: Statistics,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write every file that LeRobot's and phyai's loaders read.

    Args:
        directory: made if needed; files in it are overwritten.
        tensors: the weights under their checkpoint names, with or without a leading ``model.``.
        config: sizes and shapes of the policy.
        statistics: of the state and the action, for both processors.
        dtype: storage type of the weights.

    Raises:
        ValueError: a tensor is missing, unknown, or has another shape than `config` says.
    """
    weights = {name.removeprefix("model."): value for name, value in tensors.items()}
    _check(weights, tensor_shapes(config))
    # LeRobot's strict loader wants the expert's output head, which nothing reads.
    weights[_EXPERT_HEAD] = torch.zeros(config.language.vocab, config.expert.width)
    stored = {
        f"model.{name}": value.detach().to("cpu", dtype).contiguous()
        for name, value in weights.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    alias = f"model.{keys.LANGUAGE}.embed_tokens.weight"
    metadata = {"format": "pt", alias: f"model.{EMBEDDING}"}
    save_file(stored, directory / "model.safetensors", metadata=metadata)
    state = {name: value.float().contiguous() for name, value in statistics.tensors().items()}
    save_file(state, directory / PREPROCESSOR_STATE)
    save_file(state, directory / POSTPROCESSOR_STATE)
    _write(directory / "config.json", _policy_config(config))
    _write(directory / "policy_preprocessor.json", _preprocessor(config))
    _write(directory / "policy_postprocessor.json", _postprocessor(config))
    _write(directory / SIDECAR, {"vision_num_heads": config.vision.heads})
    save_tokenizer(directory)


def _check(weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing, unknown = sorted(shapes.keys() - weights), sorted(weights.keys() - shapes)
    if missing or unknown:
        raise ValueError(
            f"the weights do not fit the configuration: missing {missing or 'none'}, "
            f"unknown {unknown or 'none'}; give every tensor of reach.sizes.tensor_shapes"
        )
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(weights[name].shape)}, the configuration says {shape}; "
                "build the model from the same configuration"
            )


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _input_features(config: PI05Config) -> dict[str, Any]:
    cameras = {
        f"observation.images.{name}": {"type": "VISUAL", "shape": [3, *config.image_resolution]}
        for name in config.cameras
    }
    return cameras | {STATE: {"type": "STATE", "shape": [config.state_dim]}}


def _output_features(config: PI05Config) -> dict[str, Any]:
    return {ACTION: {"type": "ACTION", "shape": [config.action_dim]}}


def _policy_config(config: PI05Config) -> dict[str, Any]:
    """LeRobot refuses fields that it does not know, so these are exactly its own."""
    return {
        "type": "pi05",
        "n_obs_steps": 1,
        "input_features": _input_features(config),
        "output_features": _output_features(config),
        "device": "cpu",
        "use_amp": False,
        "use_peft": False,
        "push_to_hub": False,
        "repo_id": None,
        "private": None,
        "tags": None,
        "license": None,
        "pretrained_path": None,
        "pretrained_revision": None,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": "float32",
        "chunk_size": config.chunk_size,
        "n_action_steps": ACTION_STEPS,
        "max_state_dim": config.max_state_dim,
        "max_action_dim": config.max_action_dim,
        "num_inference_steps": config.num_steps,
        "time_sampling_beta_alpha": 1.5,
        "time_sampling_beta_beta": 1.0,
        "time_sampling_scale": 0.999,
        "time_sampling_offset": 0.001,
        "min_period": config.min_period,
        "max_period": config.max_period,
        "use_relative_actions": False,
        "relative_exclude_joints": ["gripper"],
        "action_feature_names": None,
        "rtc_config": None,
        "image_resolution": list(config.image_resolution),
        "empty_cameras": config.empty_cameras,
        "tokenizer_max_length": config.tokenizer_max_length,
        "normalization_mapping": _NORMALIZATION,
    }


def _step(name: str, config: Mapping[str, Any] | None = None, **extra: str) -> dict[str, Any]:
    return {"registry_name": name, "config": dict(config or {}), **extra}


def _device_step() -> dict[str, Any]:
    return _step("device_processor", {"device": "cpu", "float_dtype": None})


def _preprocessor(config: PI05Config) -> dict[str, Any]:
    """The tokenizer's name is a path: the folder of the checkpoint."""
    normalizer = {
        "eps": 1e-8,
        "features": _input_features(config) | _output_features(config),
        "norm_map": _NORMALIZATION,
    }
    relative = {"enabled": False, "exclude_joints": ["gripper"], "action_names": None}
    tokenizer = {
        "max_length": config.tokenizer_max_length,
        "task_key": "task",
        "padding_side": "right",
        "padding": "max_length",
        "truncation": True,
        "tokenizer_name": ".",
    }
    return {
        "name": "policy_preprocessor",
        "steps": [
            _step("rename_observations_processor", {"rename_map": {}}),
            _step("to_batch_processor"),
            _step("relative_actions_processor", relative),
            _step("normalizer_processor", normalizer, state_file=PREPROCESSOR_STATE),
            _step("pi05_prepare_state_tokenizer_processor_step"),
            _step("tokenizer_processor", tokenizer),
            _device_step(),
        ],
    }


def _postprocessor(config: PI05Config) -> dict[str, Any]:
    unnormalizer = {
        "eps": 1e-8,
        "features": _output_features(config),
        "norm_map": _NORMALIZATION,
    }
    return {
        "name": "policy_postprocessor",
        "steps": [
            _step("unnormalizer_processor", unnormalizer, state_file=POSTPROCESSOR_STATE),
            _step("absolute_actions_processor", {"enabled": False}),
            _device_step(),
        ],
    }
