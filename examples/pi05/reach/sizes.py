"""Sizes of the small pi0.5: every width fits INT4 groups of 128 and the rotations of ConvRot."""

import math

from phyai.models.pi05 import keys
from phyai.models.pi05.config import PI05Config
from phyai.models.pi05.sizes import DecoderSizes, VisionSizes
from reach.chunks import CHUNK
from reach.data import CAMERAS
from reach.scene import IMAGE_SIZE
from reach.tokenizer import MAX_LENGTH, build_tokenizer

STATE_DIM = 4
ACTION_DIM = 2
EMBEDDING = f"{keys.PALIGEMMA}.lm_head.weight"
"""The one name under which the embedding is stored; LeRobot copies it to its second place."""
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


def tensor_shapes(config: PI05Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint, without LeRobot's leading ``model.``.

    The embedding is stored once, under `EMBEDDING`.
    """
    language, expert = config.language, config.expert
    shapes = _vision_shapes(config.vision)
    shapes |= _linear(keys.PROJECTOR, config.vision.width, language.width)
    shapes[EMBEDDING] = (language.vocab, language.width)
    shapes |= _decoder_shapes(keys.LANGUAGE, language, adaptive=False)
    shapes |= _decoder_shapes(keys.EXPERT, expert, adaptive=True)
    shapes |= _linear("action_in_proj", config.max_action_dim, expert.width)
    shapes |= _linear("action_out_proj", expert.width, config.max_action_dim)
    shapes |= _linear("time_mlp_in", expert.width, expert.width)
    return shapes | _linear("time_mlp_out", expert.width, expert.width)


def count_parameters(config: PI05Config) -> int:
    """Parameters that a policy of these sizes has; the tied embedding counts once."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _layernorm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _vision_shapes(sizes: VisionSizes) -> dict[str, tuple[int, ...]]:
    width = sizes.width
    stem = f"{keys.VISION}.embeddings"
    shapes: dict[str, tuple[int, ...]] = {
        f"{stem}.patch_embedding.weight": (width, 3, sizes.patch, sizes.patch),
        f"{stem}.patch_embedding.bias": (width,),
        f"{stem}.position_embedding.weight": (sizes.tokens, width),
    }
    for index in range(sizes.layers):
        layer = f"{keys.VISION}.encoder.layers.{index}"
        for norm in ("layer_norm1", "layer_norm2"):
            shapes |= _layernorm(f"{layer}.{norm}", width)
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{layer}.self_attn.{projection}", width, width)
        shapes |= _linear(f"{layer}.mlp.fc1", width, sizes.mlp)
        shapes |= _linear(f"{layer}.mlp.fc2", sizes.mlp, width)
    return shapes | _layernorm(f"{keys.VISION}.post_layernorm", width)


def _decoder_shapes(
    prefix: str, sizes: DecoderSizes, *, adaptive: bool
) -> dict[str, tuple[int, ...]]:
    width = sizes.width
    queries, key_values = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim

    def norm(name: str) -> dict[str, tuple[int, ...]]:
        return (
            _linear(f"{name}.dense", width, 3 * width) if adaptive else {f"{name}.weight": (width,)}
        )

    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(sizes.layers):
        layer = f"{prefix}.layers.{index}"
        shapes |= norm(f"{layer}.input_layernorm") | norm(f"{layer}.post_attention_layernorm")
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (queries, width),
            f"{layer}.self_attn.k_proj.weight": (key_values, width),
            f"{layer}.self_attn.v_proj.weight": (key_values, width),
            f"{layer}.self_attn.o_proj.weight": (width, queries),
            f"{layer}.mlp.gate_proj.weight": (sizes.mlp, width),
            f"{layer}.mlp.up_proj.weight": (sizes.mlp, width),
            f"{layer}.mlp.down_proj.weight": (width, sizes.mlp),
        }
    return shapes | norm(f"{prefix}.norm")
