"""Token embedding."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from phyai.checkpoints.slots import TensorSlot, copy_slot
from phyai.dispatch import CallSite
from phyai.layers.parallel import TensorParallel


class Embedding(nn.Module):
    """A table of token vectors.

    Args:
        vocab: number of tokens.
        width: vector width.
        key: checkpoint name of the table.
        aliases: further names under which a checkpoint may store the same (tied) table.
        params_dtype: storage dtype.
        device: where the table lives.
        tp: this rank; each holds an equal part of the table, and vectors are summed over them.

    Raises:
        ValueError: if the ranks cannot hold equal parts of the vocabulary.
    """

    start: int

    def __init__(
        self,
        vocab: int,
        width: int,
        *,
        key: str,
        aliases: tuple[str, ...] = (),
        params_dtype: torch.dtype,
        device: torch.device | str = "cpu",
        tp: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        self.vocab = vocab
        self.width = width
        self.tp: TensorParallel = TensorParallel() if tp is None else tp
        self.start, rows = self.tp.part(vocab, "the vocabulary")
        self._key, self._aliases = key, aliases
        self.weight: nn.Parameter = nn.Parameter(
            torch.empty(rows, width, dtype=params_dtype, device=device), requires_grad=False
        )
        self._site = CallSite(
            "embedding",
            role="embedding",
            dims={"embedding_dim": width},
            attrs={"shard_start": self.start, "shard_end": self.start + rows},
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Maps token ids [T] to vectors [T, width]."""
        selection = self._site.select(
            device=ids.device,
            dtype={"input": ids.dtype, "weight": self.weight.dtype},
            dims={"tokens": ids.numel()},
        )
        stop = self.start + self.weight.shape[0]
        return self.tp.all_reduce(selection.execute(ids, self.weight, self.start, stop))

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields the table."""
        whole = (self.vocab, self.width)
        yield copy_slot(
            self._key, self.weight, aliases=self._aliases, whole=whole, first_row=self.start
        )
