"""Golden data of LeRobot's processors: raw observations in, tokens, images and actions out."""
# pyright: reportMissingImports=false

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from golden_policies import ACTION_DIM, CAMERAS, CHUNK_SIZE, MAX_DIM, STATE_DIM, build_config
from lerobot_tiny import IMAGE_PREFIX, lerobot_observation
from safetensors.torch import save_file
from torch import Tensor

QUANTILES = {"q01": -2.0, "q10": -1.0, "q50": 0.25, "q90": 1.5, "q99": 2.5}


@dataclass(frozen=True)
class ObservationCase:
    """One raw observation: (height, width) of the cameras present, state, instruction."""

    image_sizes: dict[str, tuple[int, int]]
    state: tuple[float, ...]
    task: str


# The third state column has equal quantiles. Values lie on bin edges, outside the range, and far.
OBSERVATIONS = {
    "wide": ObservationCase(
        {CAMERAS[0]: (48, 64), CAMERAS[1]: (28, 28), CAMERAS[2]: (31, 17)},
        (-2.0, 0.25, 0.7, 2.4, 0.0),
        "pick up the red block",
    ),
    "untidy_task": ObservationCase(
        {CAMERAS[0]: (27, 45), CAMERAS[2]: (100, 20)},
        (-3.5, 2.6, 0.70001, -1.0, 250.0),
        "  stack_the\ncups ",
    ),
    "truncated_prompt": ObservationCase(
        {CAMERAS[1]: (14, 14)},
        (1.5, 0.1, 0.7, 0.3, -0.9),
        "reach the café target and open the drawer and then stack every cup, slowly!",
    ),
    "newline_at_end": ObservationCase(
        {CAMERAS[0]: (2, 29)}, (0.0, 0.0, 0.0, 0.0, 0.0), "reach the target\n"
    ),
    "empty_task": ObservationCase({CAMERAS[0]: (28, 29)}, (0.5, 1.0, 0.7, 2.5, -2.0), ""),
}


def dataset_stats() -> dict[str, dict[str, np.ndarray]]:
    """Return statistics as LeRobot's data sets carry them; one column has no spread."""
    return {
        "observation.state": _feature_stats(STATE_DIM, flat_column=2, level=0.7),
        "action": _feature_stats(ACTION_DIM, flat_column=1, level=-0.4),
    }


def _feature_stats(width: int, flat_column: int, level: float) -> dict[str, np.ndarray]:
    scale = 1.0 + 0.25 * np.arange(width, dtype=np.float32)
    scale[flat_column] = 0.0
    shift = np.linspace(0.0, 0.3, width, dtype=np.float32)
    shift[flat_column] = level
    stats = {name: shift + quantile * scale for name, quantile in QUANTILES.items()}
    stats |= {"mean": shift + 0.1 * scale, "std": 0.8 * scale}
    stats |= {"min": shift - 3.0 * scale, "max": shift + 4.0 * scale, "count": np.array([900])}
    return {name: np.asarray(values, dtype=np.float32) for name, values in stats.items()}


def make_processors(config: Any, tokenizer_dir: Path) -> tuple[Any, Any]:
    """Return LeRobot's new processors of a policy, with a tokenizer folder for the hub's name."""
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.processor import tokenizer_processor
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    with mock.patch.object(tokenizer_processor, "AutoTokenizer") as hub:
        hub.from_pretrained.return_value = tokenizer
        return make_pre_post_processors(config, dataset_stats=dataset_stats())


def write_processing(policy: Any, directory: Path) -> None:
    """Write the processor files and ``processing.safetensors`` of a policy.

    Per observation: ``image.<camera>`` uint8 ``[H, W, 3]``, ``state`` ``[state_dim]``, and what
    LeRobot makes of them: ``tokens`` int64 and ``token_mask`` bool ``[L]``, ``normalized_state``
    ``[state_dim]`` and ``model_image.<camera>`` ``[3, side, side]``. Then ``normalized_actions``
    and ``actions`` ``[T, action_dim]``, and the whole way from the observation: ``chunk_noise``
    ``[T, max_action_dim]`` and ``chunk_actions`` ``[T, action_dim]`` in robot units. The metadata
    field ``cases`` is JSON: task and prompt per observation.
    """
    preprocessor, postprocessor = make_processors(policy.config, directory)
    preprocessor.save_pretrained(directory)
    postprocessor.save_pretrained(directory)
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, Tensor] = {}
    texts: dict[str, dict[str, str]] = {}
    for name, case in OBSERVATIONS.items():
        raw = _raw_observation(case, generator)
        tensors |= {f"{name}.{key}": value.clone() for key, value in raw.items()}
        processed = preprocessor(lerobot_observation(raw, case.task))
        tensors |= {f"{name}.{k}": v for k, v in _model_side(policy, processed).items()}
        texts[name] = {"task": case.task, "prompt": processed["task"][0]}
        actions = torch.randn(1, CHUNK_SIZE, ACTION_DIM, generator=generator)
        tensors[f"{name}.normalized_actions"] = actions[0]
        tensors[f"{name}.actions"] = postprocessor(actions)[0]
        noise = torch.randn(1, CHUNK_SIZE, MAX_DIM, generator=generator)
        tensors[f"{name}.chunk_noise"] = noise[0]
        chunk = policy.predict_action_chunk(processed, noise=noise)
        tensors[f"{name}.chunk_actions"] = postprocessor(chunk)[0]
    _save(tensors, texts, directory)


def _raw_observation(case: ObservationCase, generator: torch.Generator) -> dict[str, Tensor]:
    images = {
        f"image.{camera}": torch.randint(0, 256, (*size, 3), generator=generator, dtype=torch.uint8)
        for camera, size in case.image_sizes.items()
    }
    return {**images, "state": torch.tensor(case.state)}


def _model_side(policy: Any, processed: dict[str, Any]) -> dict[str, Tensor]:
    images, masks = policy._preprocess_images(processed)
    present = [name for name in policy.config.image_features if name in processed]
    # LeRobot puts absent cameras last, as black images with a mask.
    found = {
        f"model_image.{name.removeprefix(IMAGE_PREFIX)}": image[0]
        for name, image, mask in zip(present, images, masks, strict=False)
        if mask.all()
    }
    return found | {
        "tokens": processed["observation.language.tokens"][0],
        "token_mask": processed["observation.language.attention_mask"][0],
        "normalized_state": processed["observation.state"][0],
    }


def _save(tensors: dict[str, Tensor], texts: dict[str, Any], directory: Path) -> None:
    save_file(
        {name: value.clone().contiguous() for name, value in tensors.items()},
        directory / "processing.safetensors",
        metadata={"cases": json.dumps(texts, ensure_ascii=False)},
    )


def write_normalization_modes(output: Path) -> None:
    """Write processors without a model: the other normalisation modes, and relative actions.

    ``processors_<mode>/processing.safetensors`` holds ``state``, ``normalized_state``
    ``[state_dim]``, ``normalized_actions`` and ``actions`` ``[T, action_dim]``.
    """
    modes: dict[str, dict[str, Any]] = {
        mode: {"normalization_mapping": dict.fromkeys(("STATE", "ACTION"), mode.upper())}
        for mode in ("min_max", "mean_std", "quantile10", "identity")
    }
    modes["relative"] = {
        "use_relative_actions": True,
        "action_feature_names": ["shoulder", "elbow", "gripper_left", "wrist"],
    }
    for name, changes in modes.items():
        _write_mode(output / f"processors_{name}", changes, output / "pi05_tiny")


def _write_mode(directory: Path, changes: dict[str, Any], tokenizer_dir: Path) -> None:
    from lerobot.configs import NormalizationMode

    mapping = changes.get("normalization_mapping", {})
    enums = {kind: NormalizationMode(mode) for kind, mode in mapping.items()}
    fields: dict[str, Any] = {**changes, "normalization_mapping": enums} if enums else changes
    config = build_config("pi05", **fields)
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    preprocessor, postprocessor = make_processors(config, tokenizer_dir)
    preprocessor.save_pretrained(directory)
    postprocessor.save_pretrained(directory)
    state = torch.tensor([0.3, -1.7, 0.7, 12.0, 0.0])
    processed = preprocessor({"observation.state": state[None], "task": "go"})
    actions = torch.randn(1, CHUNK_SIZE, ACTION_DIM, generator=torch.Generator().manual_seed(3))
    tensors = {
        "state": state,
        "normalized_state": processed["observation.state"][0],
        "normalized_actions": actions[0],
        "actions": postprocessor(actions)[0],
    }
    _save(tensors, {"prompt": processed["task"][0]}, directory)
