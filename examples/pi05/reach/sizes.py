"""Sizes of the small pi0.5: every width fits INT4 groups of 128 and the rotations of ConvRot."""

from phyai.models.pi05.config import DecoderSizes, PI05Config, VisionSizes
from reach.data import CAMERAS
from reach.expert import CHUNK
from reach.scene import IMAGE_SIZE
from reach.tokenizer import MAX_LENGTH, build_tokenizer

ACTION_STEPS = 8
"""Actions of a chunk that are executed before the next look."""
STATE_DIM = 4
ACTION_DIM = 2
_PATCH = 14


def reach_config() -> PI05Config:
    """The shipped policy: 36 tokens per camera, heads of 64, 4 decoder layers."""
    return PI05Config(
        family="pi05",
        layout="lerobot",
        cameras=CAMERAS,
        state_dim=STATE_DIM,
        action_dim=ACTION_DIM,
        max_state_dim=32,
        max_action_dim=32,
        chunk_size=CHUNK,
        num_steps=10,
        tokenizer_max_length=MAX_LENGTH,
        image_resolution=(IMAGE_SIZE, IMAGE_SIZE),
        empty_cameras=0,
        min_period=4e-3,
        max_period=4.0,
        vision=VisionSizes(
            width=128,
            layers=3,
            heads=2,
            mlp=256,
            patch=_PATCH,
            tokens=(IMAGE_SIZE // _PATCH) ** 2,
        ),
        language=DecoderSizes(
            width=256,
            layers=4,
            heads=8,
            kv_heads=1,
            head_dim=64,
            mlp=512,
            vocab=build_tokenizer().get_vocab_size(),
        ),
        expert=DecoderSizes(width=128, layers=4, heads=8, kv_heads=1, head_dim=64, mlp=256),
    )


def count_parameters(config: PI05Config) -> int:
    """Parameters that a checkpoint of these sizes stores; the tied embedding counts once."""
    language, expert = config.language, config.expert
    projector = (config.vision.width + 1) * language.width
    language_norms = (2 * language.layers + 1) * language.width
    adaptive_norms = (2 * expert.layers + 1) * 3 * expert.width * (expert.width + 1)
    action = 2 * expert.width * config.max_action_dim + expert.width + config.max_action_dim
    time = 2 * expert.width * (expert.width + 1)
    return (
        _vision_parameters(config.vision)
        + projector
        + language.vocab * language.width
        + _projections(language)
        + language_norms
        + _projections(expert)
        + adaptive_norms
        + action
        + time
    )


def _vision_parameters(sizes: VisionSizes) -> int:
    width = sizes.width
    stem = width * (3 * sizes.patch**2 + 1) + sizes.tokens * width
    attention = 4 * width * (width + 1)
    mlp = 2 * width * sizes.mlp + sizes.mlp + width
    return stem + sizes.layers * (attention + mlp + 4 * width) + 2 * width


def _projections(sizes: DecoderSizes) -> int:
    """Weights of attention and MLP, without norms."""
    attention = 2 * (sizes.heads + sizes.kv_heads) * sizes.head_dim * sizes.width
    return sizes.layers * (attention + 3 * sizes.width * sizes.mlp)
