"""Sizes of the model's parts, read from the shapes of a checkpoint's tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

from phyai.checkpoints import CheckpointError
from phyai.models.pi05 import keys

Shapes = Mapping[str, tuple[int, ...]]
SIDECAR = "phyai_config.json"
_SO400M_WIDTH, _SO400M_HEADS = 1152, 16


@dataclass(frozen=True)
class VisionSizes:
    """SigLIP tower: patch embedding, ``layers`` pre-norm blocks, projector."""

    width: int
    layers: int
    heads: int
    mlp: int
    patch: int
    tokens: int


@dataclass(frozen=True)
class DecoderSizes:
    """A Gemma decoder body; ``vocab`` is 0 where there is no embedding."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int = 0


def shape_of(shapes: Shapes, name: str) -> tuple[int, ...]:
    """Returns the shape of a tensor; raises CheckpointError if there is none of that name."""
    if name not in shapes:
        raise CheckpointError(
            f"the checkpoint has no tensor {name}, from which the model's sizes are read"
        )
    return shapes[name]


def _depth(shapes: Shapes, prefix: str) -> int:
    start = f"{prefix}.layers."
    found = {
        int(number)
        for name in shapes
        if name.startswith(start) and (number := name[len(start) :].split(".")[0]).isdigit()
    }
    if not found:
        raise CheckpointError(f"the checkpoint has no tensor under {start}")
    return max(found) + 1


def vision_sizes(shapes: Shapes, head_count: object) -> VisionSizes:
    """Reads the tower's sizes; ``head_count`` is the sidecar's, needed unless the tower is So400m.

    Raises:
        CheckpointError: if a tensor is missing or the head count does not fit.
    """
    width, _, patch, _ = shape_of(shapes, f"{keys.VISION}.embeddings.patch_embedding.weight")
    if head_count is None and width == _SO400M_WIDTH:
        head_count = _SO400M_HEADS
    if isinstance(head_count, bool) or not isinstance(head_count, int) or head_count < 1:
        raise CheckpointError(
            f"the number of vision heads is {head_count!r}; no tensor shape tells it for a tower "
            f'of width {width}: put {{"vision_num_heads": N}} into {SIDECAR} beside config.json'
        )
    if width % head_count:
        raise CheckpointError(f"{SIDECAR}: {head_count} vision heads do not divide width {width}")
    return VisionSizes(
        width=width,
        layers=_depth(shapes, f"{keys.VISION}.encoder"),
        heads=head_count,
        mlp=shape_of(shapes, f"{keys.VISION}.encoder.layers.0.mlp.fc1.weight")[0],
        patch=patch,
        tokens=shape_of(shapes, f"{keys.VISION}.embeddings.position_embedding.weight")[0],
    )


def decoder_sizes(shapes: Shapes, prefix: str, *, vocab: bool) -> DecoderSizes:
    """Reads a body's sizes under ``prefix``; there is one key head, so its rows are head_dim.

    Raises:
        CheckpointError: if a tensor is missing or the heads do not fit.
    """
    first = f"{prefix}.layers.0"
    rows, width = shape_of(shapes, f"{first}.self_attn.q_proj.weight")
    head_dim = shape_of(shapes, f"{first}.self_attn.k_proj.weight")[0]
    if rows % head_dim:
        raise CheckpointError(
            f"{first}: q_proj has {rows} rows, not a multiple of the single key head's {head_dim}"
        )
    table = next((shapes[name] for name in keys.EMBEDDING if name in shapes), None)
    if vocab and table is None:
        raise CheckpointError(
            f"the checkpoint has no embedding table ({' or '.join(keys.EMBEDDING)})"
        )
    return DecoderSizes(
        width=width,
        layers=_depth(shapes, prefix),
        heads=rows // head_dim,
        kv_heads=1,
        head_dim=head_dim,
        mlp=shape_of(shapes, f"{first}.mlp.gate_proj.weight")[0],
        vocab=table[0] if vocab and table else 0,
    )
