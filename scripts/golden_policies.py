"""Tiny random policies and the inputs that the golden outputs are computed from."""
# pyright: reportMissingImports=false

from dataclasses import dataclass
from typing import Any

import torch
from lerobot_tiny import GemmaSizes, PolicySizes, VisionSizes, patched_sizes, policy_class
from torch import Tensor

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
IMAGE_SIDE = 28
CHUNK_SIZE = 6
STATE_DIM, ACTION_DIM, MAX_DIM = 5, 4, 8
PROMPT_SLOTS = 12

SIZES = {
    "pi05": PolicySizes(
        vision=VisionSizes(width=32, depth=2, mlp_dim=48, num_heads=4, patch_size=14),
        language=GemmaSizes(48, 3, 64, num_heads=8, num_kv_heads=1, head_dim=16),
        expert=GemmaSizes(32, 3, 48, num_heads=8, num_kv_heads=1, head_dim=16),
        vocab_size=320,
        expert_vocab_size=320,
    ),
    "pi0": PolicySizes(
        vision=VisionSizes(width=24, depth=2, mlp_dim=40, num_heads=3, patch_size=14),
        language=GemmaSizes(32, 2, 48, num_heads=8, num_kv_heads=1, head_dim=8),
        expert=GemmaSizes(16, 2, 32, num_heads=8, num_kv_heads=1, head_dim=8),
        vocab_size=320,
        expert_vocab_size=320,
    ),
}
SEEDS = {"pi05": 5, "pi0": 0}


@dataclass(frozen=True)
class InputGroup:
    """One batch of model inputs and noise.

    Attributes:
        prompt_lengths: real tokens of each sample, at most ``PROMPT_SLOTS``.
        cameras: cameras present in each sample.
        num_steps: step counts that actions are stored for.
    """

    prompt_lengths: tuple[int, ...]
    cameras: tuple[tuple[str, ...], ...]
    num_steps: tuple[int, ...] = (10,)


BASE, LEFT, RIGHT = CAMERAS
GROUPS = {
    "single": InputGroup((9,), (CAMERAS,), num_steps=(1, 4, 10)),
    "ragged": InputGroup((9, 5), (CAMERAS, CAMERAS), num_steps=(1, 10)),
    "last_camera_missing": InputGroup((9, 5), ((BASE, LEFT), (BASE, LEFT))),
    "middle_camera_missing": InputGroup((PROMPT_SLOTS,), ((BASE, RIGHT),)),
    "mixed_cameras": InputGroup((9, 1, PROMPT_SLOTS), ((BASE, RIGHT), (LEFT,), CAMERAS)),
}


def build_config(family: str, dtype: str = "float32", **changes: Any) -> Any:
    """Return LeRobot's configuration of a tiny policy."""
    from lerobot.configs import FeatureType, PolicyFeature

    images = {
        f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, IMAGE_SIDE, IMAGE_SIDE))
        for name in CAMERAS
    }
    state = {"observation.state": PolicyFeature(FeatureType.STATE, (STATE_DIM,))}
    fields = {
        "input_features": images | state,
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
        "device": "cpu",
        "dtype": dtype,
        "chunk_size": CHUNK_SIZE,
        "n_action_steps": CHUNK_SIZE,
        "max_state_dim": MAX_DIM,
        "max_action_dim": MAX_DIM,
        "image_resolution": (IMAGE_SIDE, IMAGE_SIDE),
        "tokenizer_max_length": 64 if family == "pi05" else 16,
    }
    return policy_class(family).config_class(**(fields | changes))


def build_policy(family: str, dtype: str = "float32") -> Any:
    """Return a LeRobot policy whose every parameter is random, the same ones for each dtype."""
    with patched_sizes(family, SIZES[family]):
        policy = policy_class(family)(build_config(family, dtype))
    generator = torch.Generator().manual_seed(SEEDS[family])
    with torch.no_grad():
        for name, parameter in sorted(policy.named_parameters()):
            parameter.copy_(_random_parameter(name, parameter.shape, generator))
    return policy.eval()


def _random_parameter(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Draw weights that make the output depend visibly on every part of the model.

    LeRobot's own initial values leave the gates of the adaptive norms at zero, which makes the
    expert the identity, and its small projections make attention nearly uniform. Larger gains than
    these amplify fp32 rounding: changing one image patch or token moves the actions by more than
    1e-2, two correct fp32 implementations differ by about 2e-6.
    """
    values = torch.randn(shape, generator=generator)
    if "norm" in name:
        centred_on_one = "layer_norm" in name or "post_layernorm" in name
        offset = 1.0 if centred_on_one and name.endswith("weight") else 0.0
        return offset + 0.3 * values
    if name.endswith("bias"):
        return 0.2 * values
    if "embed_tokens" in name or "lm_head" in name:
        return values / shape[1] ** 0.5
    if "position_embedding" in name:
        return 0.5 * values
    gain = 1.2 if "q_proj" in name or "k_proj" in name else 1.0
    return gain * values / (values[0].numel() ** 0.5)


def draw_inputs(group: InputGroup, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the model inputs of a group; B samples, V cameras, L prompt slots, T actions.

    ``images`` uint8 ``[B, V, 3, H, W]`` (the model reads ``x / 255 * 2 - 1``), ``image_mask`` bool
    ``[B, V]``, ``tokens`` int64 and ``token_mask`` bool ``[B, L]``, ``state`` float32
    ``[B, max_state_dim]`` (zero beyond the robot's columns), ``noise`` float32
    ``[B, T, max_action_dim]``.
    """
    batch = len(group.prompt_lengths)
    image_shape = (batch, len(CAMERAS), 3, IMAGE_SIDE, IMAGE_SIDE)
    lengths = torch.tensor(group.prompt_lengths)[:, None]
    token_mask = torch.arange(PROMPT_SLOTS)[None] < lengths
    tokens = torch.randint(5, 320, (batch, PROMPT_SLOTS), generator=generator)
    state = torch.zeros(batch, MAX_DIM)
    state[:, :STATE_DIM] = torch.randn(batch, STATE_DIM, generator=generator)
    return {
        "images": torch.randint(0, 256, image_shape, generator=generator, dtype=torch.uint8),
        "image_mask": torch.tensor([[name in row for name in CAMERAS] for row in group.cameras]),
        "tokens": torch.where(token_mask, tokens, 0),
        "token_mask": token_mask,
        "state": state,
        "noise": torch.randn(batch, CHUNK_SIZE, MAX_DIM, generator=generator),
    }
