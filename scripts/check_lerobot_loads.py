# /// script
# requires-python = "==3.12.*"
# dependencies = [
#     "lerobot[pi]==0.6.1",
#     "protobuf==7.36.2",
#     "sentencepiece==0.2.3",
#     "tokenizers==0.22.2",
#     "torch==2.11.0",
#     "torchvision==0.26.0",
#     "transformers==5.5.4",
# ]
# ///
"""Check that LeRobot itself loads a π0.5 or π0 checkpoint, and store one chunk that it computes.

    uv run --isolated --no-project --python 3.12 scripts/check_lerobot_loads.py CHECKPOINT

The policy and both processors are read by LeRobot's own loaders; LeRobot goes on with random
weights when its loading fails, so every tensor is compared with the file afterwards. Sizes that
differ from the published ones are put into LeRobot's tables first. Exit status 1 and a message on
any mismatch. Nothing is downloaded.
"""
# pyright: reportMissingImports=false

import argparse
import contextlib
import io
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from lerobot_tiny import (
    IMAGE_PREFIX,
    CheckpointMismatchError,
    lerobot_observation,
    patched_sizes,
    policy_class,
    read_sizes,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

HEAD = "model.paligemma_with_expert.paligemma.lm_head.weight"
EMBEDDING = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class RawObservation:
    """``image.<camera>`` uint8 ``[H, W, 3]`` and ``state`` ``[state_dim]``, and the instruction."""

    tensors: dict[str, Tensor]
    task: str


def load_policy(checkpoint_dir: Path) -> Any:
    """Return the policy that LeRobot loads, after comparing it with the file.

    Raises:
        CheckpointMismatchError: when a file is unreadable or any tensor was not loaded.
    """
    import lerobot.policies.factory  # noqa: F401  (registers the policy types)
    from lerobot.configs import PreTrainedConfig

    try:
        config = PreTrainedConfig.from_pretrained(checkpoint_dir)
    except Exception as error:
        raise CheckpointMismatchError(f"LeRobot refuses config.json: {error}") from error
    config.device = "cpu"
    build = policy_class(config.type)
    said = io.StringIO()
    with patched_sizes(config.type, read_sizes(checkpoint_dir)), contextlib.redirect_stdout(said):
        policy = build.from_pretrained(checkpoint_dir, config=config)
    differences = list(_differences(policy, checkpoint_dir))
    if differences:
        shown = "\n  ".join(differences[:20])
        raise CheckpointMismatchError(
            f"LeRobot did not load {len(differences)} tensors:\n  {shown}\n"
            f"LeRobot said:\n{said.getvalue()}"
        )
    return policy.eval()


def _differences(policy: Any, checkpoint_dir: Path) -> list[str]:
    stored = {
        name if name.startswith("model.") else f"model.{name}": tensor
        for name, tensor in load_file(checkpoint_dir / "model.safetensors").items()
    }
    if HEAD in stored:
        stored.setdefault(EMBEDDING, stored[HEAD])
    loaded = policy.state_dict()
    found = [f"missing in the file: {name}" for name in sorted(loaded.keys() - stored.keys())]
    found += [f"unknown to LeRobot: {name}" for name in sorted(stored.keys() - loaded.keys())]
    for name in sorted(loaded.keys() & stored.keys()):
        if loaded[name].shape != stored[name].shape:
            found.append(f"shape {tuple(stored[name].shape)} in the file: {name}")
        elif not torch.equal(loaded[name], stored[name].to(loaded[name].dtype)):
            found.append(f"other values than in the file: {name}")
    return found


def load_processors(config: Any, checkpoint_dir: Path) -> tuple[Any, Any]:
    """Return the pre- and postprocessor that LeRobot loads from a checkpoint.

    Raises:
        CheckpointMismatchError: when LeRobot refuses a file or the tokenizer's files are absent.
    """
    from lerobot.policies.factory import make_pre_post_processors

    absent = [name for name in TOKENIZER_FILES if not (checkpoint_dir / name).is_file()]
    if absent:
        raise CheckpointMismatchError(
            f"{checkpoint_dir} has no {' and no '.join(absent)}; LeRobot reads its tokenizer by "
            "name from a hub unless a folder with these files is given"
        )
    overrides = {"tokenizer_processor": {"tokenizer_name": str(checkpoint_dir)}}
    try:
        return make_pre_post_processors(
            config, pretrained_path=str(checkpoint_dir), preprocessor_overrides=overrides
        )
    except Exception as error:
        raise CheckpointMismatchError(f"LeRobot refuses the processor files: {error}") from error


def read_observation(path: Path) -> RawObservation:
    """Read an observation; the metadata field ``task`` of the file is the instruction."""
    with safe_open(path, framework="pt") as file:
        task = (file.metadata() or {}).get("task", "")
        wanted = [name for name in file.keys() if name == "state" or name.startswith("image.")]  # noqa: SIM118
        return RawObservation({name: file.get_tensor(name) for name in wanted}, task)


def random_observation(config: Any, seed: int) -> RawObservation:
    """Return random images of every camera and a random state, for a short instruction."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*config.image_resolution, 3)
    cameras = [name for name in config.image_features if "empty_camera" not in name]
    images = {
        f"image.{name.removeprefix(IMAGE_PREFIX)}": torch.randint(
            0, 256, shape, generator=generator, dtype=torch.uint8
        )
        for name in cameras
    }
    state = torch.rand(config.robot_state_feature.shape, generator=generator)
    return RawObservation({**images, "state": state}, "reach the target")


def sample_chunk(
    policy: Any, processors: tuple[Any, Any], observation: RawObservation, seed: int
) -> dict[str, Tensor]:
    """Return ``noise`` and LeRobot's ``normalized_actions`` and ``actions``, ``[T, columns]``."""
    preprocess, postprocess = processors
    config = policy.config
    noise = torch.randn(
        (1, config.chunk_size, config.max_action_dim),
        generator=torch.Generator().manual_seed(seed),
    )
    batch = preprocess(lerobot_observation(observation.tensors, observation.task))
    normalized = policy.predict_action_chunk(batch, noise=noise)
    actions = postprocess(normalized)
    return {
        "noise": noise[0],
        "tokens": batch["observation.language.tokens"][0],
        "normalized_actions": normalized[0].clone(),
        "actions": actions[0].clone(),
    }


def check(arguments: argparse.Namespace) -> None:
    """Load, sample and store, or raise.

    Raises:
        CheckpointMismatchError: on any mismatch, or when an action is not finite.
    """
    directory = arguments.checkpoint.resolve()
    policy = load_policy(directory)
    processors = load_processors(policy.config, directory)
    if arguments.observation:
        observation = read_observation(arguments.observation)
    else:
        observation = random_observation(policy.config, arguments.seed)
    chunk = sample_chunk(policy, processors, observation, arguments.seed)
    if not chunk["actions"].isfinite().all():
        raise CheckpointMismatchError("LeRobot's actions contain values that are not finite")
    count = sum(parameter.numel() for parameter in policy.parameters())
    print(f"LeRobot loads {policy.name} with {count:,} parameters; every tensor equals the file's")
    print(f"first action: {json.dumps(chunk['actions'][0].tolist())}")
    if arguments.output:
        tensors = {name: value.contiguous() for name, value in observation.tensors.items()}
        save_file(tensors | chunk, arguments.output, metadata={"task": observation.task})
        print(f"wrote {arguments.output}")


def main() -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(description="Check that LeRobot itself loads a checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="folder in LeRobot's layout")
    parser.add_argument("--observation", type=Path, help="safetensors with image.<camera>, state")
    parser.add_argument("--seed", type=int, default=0, help="of noise and random observation")
    parser.add_argument("--output", type=Path, help="safetensors file for the computed chunk")
    torch.set_num_threads(1)
    try:
        check(parser.parse_args())
    except CheckpointMismatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
