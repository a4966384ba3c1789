"""Prompts as tensors: tokens of a whole batch from a table, without running the tokenizer."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from reach.instructions import COLOUR_NAMES, TEMPLATES, instruction
from reach.normalisation import FeatureStatistics, normalise
from reach.tokenizer import BINS, MAX_LENGTH

_BIN_EDGES = 256


def prompt_text(task: str, bins: list[int]) -> str:
    """The text of pi0.5 for a cleaned task and discretised state."""
    return f"Task: {task}, State: {' '.join(map(str, bins))};\nAction: "


def state_bins(normalised: Tensor) -> Tensor:
    """256 bins over [-1, 1]: int64, -1 below the range and 255 from its last bin upwards.

    The same as ``numpy.digitize(state, numpy.linspace(-1, 1, 257)[:-1]) - 1``.
    """
    edges = torch.linspace(-1, 1, _BIN_EDGES + 1, dtype=torch.float64)[:-1].to(normalised)
    return torch.bucketize(normalised.contiguous(), edges, right=True) - 1


@dataclass(frozen=True)
class PromptTable:
    r"""Tokens of every instruction before and after the state.

    Attributes:
        heads: ``<bos>Task: ..., State:`` of each (template, colour), int64 [T, C, longest].
        lengths: tokens in each head, int64 [T, C].
        tail: ``;\nAction:``, int64 [tail].
        first_bin: id of the number -1; the numbers are consecutive.
        state: statistics that normalise the state.
    """

    heads: Tensor
    lengths: Tensor
    tail: Tensor
    first_bin: int
    state: FeatureStatistics

    @classmethod
    def build(
        cls, tokenizer: Tokenizer, state: FeatureStatistics, device: torch.device | str = "cpu"
    ) -> "PromptTable":
        """Encode the pieces of every prompt once."""
        rows = [
            [tokenizer.encode(f"Task: {instruction(t, c)}, State: ").ids for c in _colours()]
            for t in range(len(TEMPLATES))
        ]
        lengths = torch.tensor([[len(ids) for ids in row] for row in rows])
        heads = torch.zeros(*lengths.shape, int(lengths.max()), dtype=torch.int64)
        for t, row in enumerate(rows):
            for c, ids in enumerate(row):
                heads[t, c, : len(ids)] = torch.tensor(ids)
        tail = tokenizer.encode(";\nAction: ", add_special_tokens=False).ids
        first_bin = tokenizer.encode(str(BINS[0]), add_special_tokens=False).ids[0]
        return cls(
            heads.to(device),
            lengths.to(device),
            torch.tensor(tail, device=device),
            first_bin,
            {name: value.to(device) for name, value in state.items()},
        )

    def tokens(self, template: Tensor, colour: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Prompts of a batch.

        Args:
            template: int64 [B].
            colour: colour of the target, int64 [B].
            state: float32 [B, S], not normalised.

        Returns:
            Ids int64 [B, MAX_LENGTH], padded right with 0, and their mask bool [B, MAX_LENGTH].
        """
        bins = state_bins(normalise(state, self.state)) - BINS[0] + self.first_bin
        count = len(state)
        head, length = self.heads[template, colour], self.lengths[template, colour][:, None]
        pieces = torch.cat([bins, self.tail.expand(count, -1)], dim=1)
        slot = torch.arange(MAX_LENGTH, device=state.device).expand(count, -1)
        from_head = head.gather(1, slot.clamp_max(head.shape[1] - 1))
        behind = slot - length
        from_pieces = pieces.gather(1, behind.clamp(0, pieces.shape[1] - 1))
        mask = behind < pieces.shape[1]
        ids = torch.where(behind < 0, from_head, from_pieces)
        return torch.where(mask, ids, torch.zeros_like(ids)), mask


def _colours() -> range:
    return range(len(COLOUR_NAMES))
