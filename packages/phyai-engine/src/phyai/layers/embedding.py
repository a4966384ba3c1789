"""Token embedding."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from phyai.checkpoints.slots import TensorSlot, copy_slot
from phyai.dispatch import CallSite


class Embedding(nn.Module):
    """A table of token vectors.

    Args:
        vocab: number of tokens.
        width: vector width.
        key: checkpoint name of the table.
        aliases: further names under which a checkpoint may store the same (tied) table.
        params_dtype: storage dtype.
        device: where the table lives.
    """

    def __init__(
        self,
        vocab: int,
        width: int,
        *,
        key: str,
        aliases: tuple[str, ...] = (),
        params_dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.vocab, self.width = vocab, width
        self._key, self._aliases = key, aliases
        self.weight = nn.Parameter(
            torch.empty(vocab, width, dtype=params_dtype, device=device), requires_grad=False
        )
        self._site = CallSite(
            "embedding",
            role="embedding",
            dims={"embedding_dim": width},
            attrs={"shard_start": 0, "shard_end": vocab},
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Maps token ids [T] to vectors [T, width]."""
        selection = self._site.select(
            device=ids.device,
            dtype={"input": ids.dtype, "weight": self.weight.dtype},
            dims={"tokens": ids.numel()},
        )
        return selection.execute(ids, self.weight, 0, self.vocab)

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields the table."""
        yield copy_slot(self._key, self.weight, aliases=self._aliases)
