"""Keys and values of texts that were read before, kept for the next request."""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from phyai.models.cosmos3.state import Conditions

TokenIds = tuple[int, ...]


class PromptCache:
    """Least recently used texts are dropped when the kept ones have too many tokens.

    Args:
        read: computes the conditions of token ids, int64 [S].
        device: where the ids go.
        tokens: most tokens kept, besides pinned texts; a longer text is used and not kept.
    """

    def __init__(
        self, read: Callable[[Tensor], Conditions], device: torch.device, tokens: int
    ) -> None:
        self._read = read
        self._device = device
        self._tokens = tokens
        self._pinned: dict[TokenIds, Conditions] = {}
        self._kept: OrderedDict[TokenIds, Conditions] = OrderedDict()

    def get(self, ids: TokenIds) -> Conditions:
        """Returns the conditions of a text and makes it the most recently used one."""
        if ids in self._pinned:
            return self._pinned[ids]
        if ids in self._kept:
            self._kept.move_to_end(ids)
            return self._kept[ids]
        self._kept[ids] = conditions = self._compute(ids)
        while self.tokens > self._tokens:
            self._kept.popitem(last=False)
        return conditions

    def pin(self, ids: TokenIds) -> Conditions:
        """Returns the conditions of a text that is never dropped."""
        if ids not in self._pinned:
            known = self._kept.pop(ids, None)
            self._pinned[ids] = self._compute(ids) if known is None else known
        return self._pinned[ids]

    def clear(self) -> None:
        """Forgets every text, as it must when weights change."""
        self._pinned.clear()
        self._kept.clear()

    def _compute(self, ids: TokenIds) -> Conditions:
        return self._read(torch.tensor(ids, dtype=torch.int64, device=self._device))

    @property
    def tokens(self) -> int:
        """Tokens kept, without pinned texts."""
        return sum(map(len, self._kept))
