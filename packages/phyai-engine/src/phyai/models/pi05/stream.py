"""Packed rows on their way through a decoder body: their place, residual and modulation."""

from dataclasses import dataclass

from torch import Tensor

from phyai.kernels.fp8_rows import RoundedRows
from phyai.layers import AdaRMSNorm, Linear, RMSNorm, RotaryEmbedding
from phyai.layers.norm import normed_for
from phyai.runtime.paged import PagedKVCache, PagedPlan
from phyai.runtime.segments import SegmentPlan


@dataclass(frozen=True)
class Place:
    """Where packed rows stand: their positions, and the cache they write and read.

    Attributes:
        positions: integer [T].
        rope: rotation of queries and keys.
        cache: keys and values of all layers.
        first_slot: slot of the first row's key; the others follow.
        plan: which slots each row sees.
        rotation: fp32 [T, head_dim], the rope's row at each position, if it is at hand.
    """

    positions: Tensor
    rope: RotaryEmbedding
    cache: PagedKVCache
    first_slot: int
    plan: PagedPlan | SegmentPlan
    rotation: Tensor | None = None

    def angles(self) -> Tensor:
        """Returns the rope's row at each position, fp32 [T, head_dim]: cosines, then sines."""
        if self.rotation is not None:
            return self.rotation
        return self.rope.cos_sin.index_select(0, self.positions)


@dataclass(frozen=True)
class Stream:
    """The residual between two sublayers; adding to it is left to the norm that reads it.

    Attributes:
        residual: [T, width].
        update: [T, width], what the last sublayer adds; None if nothing is left to add.
        gate: [1 or T, width] that multiplies the update; None is one.
    """

    residual: Tensor
    update: Tensor | None = None
    gate: Tensor | None = None


@dataclass(frozen=True)
class LayerModulation:
    """``(scale, shift, gate)`` [1 or T, 3 * width] for the two norms of one layer."""

    attention: Tensor
    mlp: Tensor


def normalise(
    norm: RMSNorm | AdaRMSNorm,
    stream: Stream,
    modulation: Tensor | None,
    reader: Linear | None = None,
) -> tuple[Tensor | RoundedRows, Stream]:
    """Adds what the stream has pending and normalises the sum.

    Args:
        norm: adaptive, or plain.
        stream: what stands before it.
        modulation: of an adaptive norm.
        reader: the product behind a plain norm, which may want rounded rows.

    Returns:
        The norm's output, and the stream with nothing pending and the gate of the next update.
    """
    x, update = stream.residual, stream.update
    if isinstance(norm, RMSNorm):
        normed, x = normed_for(reader, norm, x, update)
        return normed, Stream(x)
    assert modulation is not None, "adaptive norms need a modulation"
    if update is None:
        normed, gate = norm(x, modulation)
    else:
        assert stream.gate is not None, "adaptive norms have a gate"
        normed, x, gate = norm.add(update, x, stream.gate, modulation)
    return normed, Stream(x, None, gate)
