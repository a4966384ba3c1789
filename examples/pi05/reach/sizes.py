"""Sizes of the small pi0.5: every width fits INT4 groups of 128 and the rotations of ConvRot."""

from dataclasses import dataclass

from reach.expert import CHUNK
from reach.scene import IMAGE_SIZE
from reach.tokenizer import build_tokenizer


@dataclass(frozen=True)
class VisionSizes:
    """Vision tower: `heads` heads of `width / heads`, biases everywhere."""

    width: int = 128
    depth: int = 3
    heads: int = 2
    mlp: int = 256
    patch: int = 14
    image: int = IMAGE_SIZE

    @property
    def patches(self) -> int:
        """Tokens of one picture."""
        return (self.image // self.patch) ** 2

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        attention = 4 * (self.width * self.width + self.width)
        mlp = 2 * self.width * self.mlp + self.mlp + self.width
        norms = 4 * self.width
        stem = self.width * (3 * self.patch**2 + 1) + self.patches * self.width
        return stem + self.depth * (attention + mlp + norms) + 2 * self.width


@dataclass(frozen=True)
class DecoderSizes:
    """A Gemma body: the language model or the action expert."""

    width: int
    mlp: int
    depth: int = 4
    heads: int = 8
    kv_heads: int = 1
    head_dim: int = 64

    @property
    def projections(self) -> int:
        """Weights of attention and MLP, without norms."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.width * (2 * queries + 2 * keys)
        return self.depth * (attention + 3 * self.width * self.mlp)


@dataclass(frozen=True)
class PolicySizes:
    """The whole policy."""

    vision: VisionSizes
    language: DecoderSizes
    expert: DecoderSizes
    vocabulary: int
    chunk: int = CHUNK
    action_steps: int = 8
    state_dim: int = 4
    action_dim: int = 2
    max_state_dim: int = 32
    max_action_dim: int = 32
    flow_steps: int = 10

    @property
    def parameters(self) -> int:
        """Parameters that a checkpoint stores, the tied embedding once."""
        language, expert = self.language.width, self.expert.width
        projector = self.vision.width * language + language
        language_norms = (2 * self.language.depth + 1) * language
        adaptive_norms = (2 * self.expert.depth + 1) * (expert * 3 * expert + 3 * expert)
        action = 2 * expert * self.max_action_dim + expert + self.max_action_dim
        time = 2 * (expert * expert + expert)
        return (
            self.vision.parameters
            + projector
            + self.vocabulary * language
            + self.language.projections
            + language_norms
            + self.expert.projections
            + adaptive_norms
            + action
            + time
        )


def reach_sizes() -> PolicySizes:
    """The sizes of the shipped policy."""
    return PolicySizes(
        vision=VisionSizes(),
        language=DecoderSizes(width=256, mlp=512),
        expert=DecoderSizes(width=128, mlp=256),
        vocabulary=build_tokenizer().get_vocab_size(),
    )
