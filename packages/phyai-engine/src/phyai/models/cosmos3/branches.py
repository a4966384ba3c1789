"""Guidance branches on a device: room for keys and values, with those of the text in front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.positions import Rotations
from phyai.models.cosmos3.state import Conditions, Layout

_SEPARATE_BYTES = 4 << 30
"""Above this, all layers share the room of one, and the text's part is copied for each layer."""

_TOGETHER_ROWS = 16_384
"""Branches with more rows than this in total are computed one after the other: matrix products
are long enough, and activations would take twice the memory."""


@dataclass(frozen=True, eq=False)
class BranchGroup:
    """Branches whose rows are computed together.

    Keys and values of a branch are contiguous: its text in front, its media behind.

    Attributes:
        lengths: text tokens of each branch.
        tokens: media tokens of each branch.
        keys: [layers or 1, slots, kv_heads, head_dim].
        values: likewise.
        text: keys and values [2, layers, sum of lengths, kv_heads, head_dim] if layers share room.
        slots: int64 [branches * tokens], where each row's key and value go.
        rotation: fp32 [branches * tokens, head_dim].
    """

    lengths: tuple[int, ...]
    tokens: int
    keys: Tensor
    values: Tensor
    text: Tensor | None
    slots: Tensor
    rotation: Tensor

    @classmethod
    def allocate(
        cls,
        layout: Layout,
        lengths: Sequence[int],
        config: Cosmos3Config,
        rotations: Rotations,
        *,
        kv_heads: int,
        dtype: torch.dtype,
    ) -> BranchGroup:
        """Makes room on the device of ``rotations``.

        Args:
            layout: of the media.
            lengths: text tokens of each branch.
            config: layers and sizes.
            rotations: of the media tokens.
            kv_heads: key and value heads of this rank.
            dtype: of keys and values.
        """
        device = rotations.device
        tokens = layout.tokens(config.latent_patch_size)
        count = sum(lengths) + len(lengths) * tokens
        layers, width = config.num_hidden_layers, (kv_heads, config.head_dim)
        size = 2 * layers * count * kv_heads * config.head_dim * dtype.itemsize
        separate = size <= _SEPARATE_BYTES

        def room(*shape: int) -> Tensor:
            # A tensor of inference mode could not be filled anew outside of it.
            with torch.inference_mode(False):
                return torch.empty(*shape, *width, dtype=dtype, device=device)

        first, slots = 0, []
        for length in lengths:
            slots.append(torch.arange(first + length, first + length + tokens))
            first += length + tokens
        return cls(
            tuple(lengths),
            tokens,
            keys=room(layers if separate else 1, count),
            values=room(layers if separate else 1, count),
            text=None if separate else room(2, layers, sum(lengths)),
            slots=torch.cat(slots).to(device),
            rotation=torch.cat([rotations.media(layout, length) for length in lengths]),
        )

    @property
    def spans(self) -> list[slice]:
        """The slots of each branch."""
        spans, first = [], 0
        for length in self.lengths:
            spans.append(slice(first, first + length + self.tokens))
            first += length + self.tokens
        return spans

    def fill(self, conditions: Sequence[Conditions]) -> None:
        """Writes the text's keys and values of every branch."""
        first = 0
        for span, one in zip(self.spans, conditions, strict=True):
            if self.text is not None:
                self.text[0, :, first : first + one.length].copy_(one.keys)
                self.text[1, :, first : first + one.length].copy_(one.values)
                first += one.length
                continue
            head = slice(span.start, span.start + one.length)
            self.keys[:, head].copy_(one.keys)
            self.values[:, head].copy_(one.values)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values [slots, kv_heads, head_dim], with the text's in it."""
        if self.text is None:
            return self.keys[index], self.values[index]
        first = 0
        for span, length in zip(self.spans, self.lengths, strict=True):
            part = slice(first, first + length)
            head = slice(span.start, span.start + length)
            self.keys[0, head].copy_(self.text[0, index, part])
            self.values[0, head].copy_(self.text[1, index, part])
            first += length
        return self.keys[0], self.values[0]

    def first(self) -> BranchGroup:
        """Returns the first branch alone, in the same room."""
        count = self.spans[0].stop
        return BranchGroup(
            self.lengths[:1],
            self.tokens,
            self.keys[:, :count],
            self.values[:, :count],
            None if self.text is None else self.text[:, :, : self.lengths[0]],
            self.slots[: self.tokens],
            self.rotation[: self.tokens],
        )


class BoundBranches:
    """Conditions of one or two branches in the room that a layout needs.

    Args:
        layout: of the media.
        conditions: one for each branch.
        config: layers and sizes.
        rotations: of the media tokens.
    """

    def __init__(
        self,
        layout: Layout,
        conditions: Sequence[Conditions],
        config: Cosmos3Config,
        rotations: Rotations,
    ) -> None:
        self.layout = layout
        self.lengths: tuple[int, ...] = tuple(one.length for one in conditions)
        rows = len(self.lengths) * layout.tokens(config.latent_patch_size)
        together = rows <= _TOGETHER_ROWS
        parts = [self.lengths] if together else [(length,) for length in self.lengths]
        keys = conditions[0].keys
        self.groups: list[BranchGroup] = [
            BranchGroup.allocate(
                layout, part, config, rotations, kv_heads=keys.shape[2], dtype=keys.dtype
            )
            for part in parts
        ]
        self.fill(conditions)

    def fill(self, conditions: Sequence[Conditions]) -> None:
        """Puts other conditions of the same lengths in the same place.

        Raises:
            ValueError: if their number or lengths differ.
        """
        lengths = tuple(one.length for one in conditions)
        if lengths != self.lengths:
            raise ValueError(
                f"these branches hold texts of {self.lengths} tokens, the new ones have {lengths}; "
                "bind them anew"
            )
        left = list(conditions)
        for group in self.groups:
            count = len(group.lengths)
            group.fill(left[:count])
            left = left[count:]
        self._held = tuple(conditions)

    def holds(self, conditions: Sequence[Conditions], layout: Layout) -> bool:
        """Whether the first branches are these very conditions in this layout."""
        return (
            layout == self.layout
            and all(mine is theirs for mine, theirs in zip(self._held, conditions, strict=False))
            and len(conditions) <= len(self._held)
        )

    def parts(self, count: int) -> list[BranchGroup]:
        """Returns the groups of the first ``count`` branches."""
        if count == len(self.lengths):
            return self.groups
        return [self.groups[0] if len(self.groups) > 1 else self.groups[0].first()]
