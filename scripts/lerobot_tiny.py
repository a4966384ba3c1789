"""Small π0 and π0.5 policies inside LeRobot, whose own code only builds the published sizes.

LeRobot takes the sizes of a policy from two variant names and from constants in its code. The
functions here read the sizes of a checkpoint from its tensor shapes and put them in the place of
those tables for the time of a ``with`` block. Runs in an environment that has LeRobot 0.6.1.
"""
# pyright: reportMissingImports=false

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

FAMILIES = ("pi05", "pi0")
SIDECAR_NAME = "phyai_config.json"
IMAGE_PREFIX = "observation.images."
PUBLISHED_VISION_WIDTH, PUBLISHED_VISION_HEADS = 1152, 16

type Shapes = Mapping[str, tuple[int, ...]]


class CheckpointMismatchError(Exception):
    """A checkpoint cannot be read, or does not fill LeRobot's policy exactly."""


@dataclass(frozen=True)
class GemmaSizes:
    """Sizes of one decoder; the attribute names are those of LeRobot's ``GemmaConfig``."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class VisionSizes:
    """Sizes of the SigLIP tower."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    patch_size: int


@dataclass(frozen=True)
class PolicySizes:
    """Sizes of one policy, as far as LeRobot does not read them from ``config.json``."""

    vision: VisionSizes
    language: GemmaSizes
    expert: GemmaSizes
    vocab_size: int
    expert_vocab_size: int


def read_shapes(checkpoint_dir: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of ``model.safetensors``, without a leading ``model.``.

    Raises:
        CheckpointMismatchError: when the file is absent or is no complete safetensors file.
    """
    path = checkpoint_dir / "model.safetensors"
    try:
        with safe_open(path, framework="numpy") as tensors:
            return {
                name.removeprefix("model."): tuple(tensors.get_slice(name).get_shape())
                for name in tensors.keys()  # noqa: SIM118  (no mapping)
            }
    except Exception as error:
        raise CheckpointMismatchError(f"{path}: {error}") from error


def read_sizes(checkpoint_dir: Path) -> PolicySizes:
    """Return the sizes of a checkpoint in LeRobot's layout, read from its tensor shapes.

    The number of vision heads, which no shape tells, comes from ``phyai_config.json`` beside the
    weights. Decoders have one KV head, as in every published checkpoint.

    Raises:
        CheckpointMismatchError: when a tensor that a size is read from is absent.
    """
    shapes = read_shapes(checkpoint_dir)
    trunk = "paligemma_with_expert."
    tower = trunk + "paligemma.model.vision_tower."
    if any(name.startswith(tower + "vision_model.") for name in shapes):
        tower += "vision_model."
    patch = _shape(shapes, tower + "embeddings.patch_embedding.weight")
    vision = VisionSizes(
        width=patch[0],
        depth=_depth(shapes, tower + "encoder.layers."),
        mlp_dim=_shape(shapes, tower + "encoder.layers.0.mlp.fc1.weight")[0],
        num_heads=_vision_heads(checkpoint_dir, patch[0]),
        patch_size=patch[2],
    )
    return PolicySizes(
        vision=vision,
        language=_gemma_sizes(shapes, trunk + "paligemma.model.language_model."),
        expert=_gemma_sizes(shapes, trunk + "gemma_expert.model."),
        vocab_size=_shape(shapes, trunk + "paligemma.lm_head.weight")[0],
        expert_vocab_size=_shape(shapes, trunk + "gemma_expert.lm_head.weight")[0],
    )


def _shape(shapes: Shapes, name: str) -> tuple[int, ...]:
    if name not in shapes:
        raise CheckpointMismatchError(
            f"tensor {name!r} is not in model.safetensors; "
            "LeRobot's loader needs it, so write the checkpoint with that tensor"
        )
    return shapes[name]


def _depth(shapes: Shapes, prefix: str) -> int:
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    return 1 + max((int(m[1]) for m in map(pattern.match, shapes) if m), default=-1)


def _gemma_sizes(shapes: Shapes, prefix: str) -> GemmaSizes:
    query = _shape(shapes, prefix + "layers.0.self_attn.q_proj.weight")
    head_dim = _shape(shapes, prefix + "layers.0.self_attn.k_proj.weight")[0]
    return GemmaSizes(
        width=query[1],
        depth=_depth(shapes, prefix + "layers."),
        mlp_dim=_shape(shapes, prefix + "layers.0.mlp.gate_proj.weight")[0],
        num_heads=query[0] // head_dim,
        num_kv_heads=1,
        head_dim=head_dim,
    )


def _vision_heads(checkpoint_dir: Path, width: int) -> int:
    path = checkpoint_dir / SIDECAR_NAME
    if path.exists():
        return int(json.loads(path.read_text())["vision_num_heads"])
    if width == PUBLISHED_VISION_WIDTH:
        return PUBLISHED_VISION_HEADS
    raise CheckpointMismatchError(
        f"{path} is absent and the vision width {width} is not {PUBLISHED_VISION_WIDTH}; "
        f'write {{"vision_num_heads": N}} into it'
    )


@contextmanager
def patched_sizes(family: str, sizes: PolicySizes) -> Iterator[None]:
    """Make LeRobot build policies of ``family`` ("pi05" or "pi0") with ``sizes``."""
    modeling = importlib.import_module(f"lerobot.policies.{family}.modeling_{family}")
    decoders = {"gemma_2b": sizes.language, "gemma_300m": sizes.expert}
    replacements: dict[str, Callable[..., Any]] = {
        "get_gemma_config": decoders.__getitem__,
        "PaliGemmaForConditionalGenerationWithPiGemma": _resized_paligemma(
            modeling.PaliGemmaForConditionalGenerationWithPiGemma, sizes
        ),
        "PiGemmaForCausalLM": _resized_expert(modeling.PiGemmaForCausalLM, sizes),
    }
    originals = {name: getattr(modeling, name) for name in replacements}
    try:
        for name, replacement in replacements.items():
            setattr(modeling, name, replacement)
        yield
    finally:
        for name, original in originals.items():
            setattr(modeling, name, original)


def _resized_paligemma(build: Callable[..., Any], sizes: PolicySizes) -> Callable[..., Any]:
    def construct(config: Any) -> Any:
        vision = config.vision_config
        vision.hidden_size = sizes.vision.width
        vision.num_hidden_layers = sizes.vision.depth
        vision.intermediate_size = sizes.vision.mlp_dim
        vision.num_attention_heads = sizes.vision.num_heads
        vision.patch_size = sizes.vision.patch_size
        vision.projection_dim = config.projection_dim = sizes.language.width
        config.text_config.vocab_size = sizes.vocab_size
        return build(config=config)

    return construct


def _resized_expert(build: Callable[..., Any], sizes: PolicySizes) -> Callable[..., Any]:
    def construct(config: Any) -> Any:
        config.vocab_size = sizes.expert_vocab_size
        return build(config=config)

    return construct


def policy_class(family: str) -> Any:
    """Return LeRobot's policy class of a family.

    Raises:
        CheckpointMismatchError: for a family other than "pi05" and "pi0".
    """
    if family not in FAMILIES:
        raise CheckpointMismatchError(
            f"config.json has type {family!r}; allowed: {', '.join(FAMILIES)}"
        )
    from lerobot.policies.factory import get_policy_class

    return get_policy_class(family)


def lerobot_observation(raw: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Return a raw observation as LeRobot prepares it for its preprocessor, with a batch of one.

    Args:
        raw: tensors ``image.<camera>`` uint8 ``[H, W, 3]`` and ``state`` float32 ``[state_dim]``.
        task: the instruction.
    """
    import torch
    from lerobot.policies.utils import prepare_observation_for_inference

    arrays = {
        IMAGE_PREFIX + name.removeprefix("image.")
        if name.startswith("image.")
        else f"observation.{name}": value.numpy()
        for name, value in raw.items()
    }
    observation = prepare_observation_for_inference(arrays, torch.device("cpu"), task=task)
    observation.pop("robot_type")
    return observation
