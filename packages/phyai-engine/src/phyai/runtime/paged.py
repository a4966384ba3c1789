"""Paged key/value storage and the index plan that says which request reads which page."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PagedPlan:
    """Which query rows attend to which cache pages.

    Request ``r`` owns the query rows ``qo_indptr[r]:qo_indptr[r + 1]`` of the packed query and the
    pages ``kv_indices[kv_indptr[r]:kv_indptr[r + 1]]``, the last of which holds
    ``kv_last_page_len[r]`` keys. A request may list any pages in any order, so keys that must not
    be seen (an absent camera, prompt padding) are simply not listed.

    Attributes:
        qo_indptr: int32 [R + 1] on the device.
        kv_indptr: int32 [R + 1] on the device.
        kv_indices: int32 [total pages] on the device.
        kv_last_page_len: int32 [R] on the device.
        qo_lens: query rows of each request, on the host.
        kv_lens: keys of each request, on the host.
        page_size: keys a page holds.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_size: int = 1

    @classmethod
    def from_slots(
        cls,
        qo_lens: Sequence[int],
        kv_slots: Sequence[Tensor],
        device: torch.device | str,
    ) -> "PagedPlan":
        """Builds a plan of page size 1 from the slot numbers each request reads.

        Args:
            qo_lens: query rows of each request, R entries.
            kv_slots: int tensors [keys of request r], R entries, none empty.
            device: where the index tensors live.

        Raises:
            ValueError: if the lists differ in length or a request has no keys.
        """
        if len(qo_lens) != len(kv_slots):
            raise ValueError(f"{len(qo_lens)} query lengths but {len(kv_slots)} slot lists")
        kv_lens = tuple(int(slots.numel()) for slots in kv_slots)
        if 0 in kv_lens:
            raise ValueError(f"request {kv_lens.index(0)} has no keys to attend to")

        def index(values: Sequence[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int32, device=device)

        return cls(
            qo_indptr=index([0, *accumulate(qo_lens)]),
            kv_indptr=index([0, *accumulate(kv_lens)]),
            kv_indices=torch.cat(list(kv_slots)).to(device=device, dtype=torch.int32),
            kv_last_page_len=index([1] * len(kv_lens)),
            qo_lens=tuple(qo_lens),
            kv_lens=kv_lens,
        )


@dataclass
class PagedKVCache:
    """Keys and values of all layers, one slot per token.

    Attributes:
        keys: [layers, slots, 1, kv_heads, head_dim].
        values: same shape.
    """

    keys: Tensor
    values: Tensor
    layers: int = field(init=False)

    def __post_init__(self) -> None:
        self.layers = self.keys.shape[0]

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "PagedKVCache":
        """Allocates an uninitialised cache of page size 1."""
        shape = (layers, slots, 1, kv_heads, head_dim)
        return cls(
            torch.empty(shape, dtype=dtype, device=device),
            torch.empty(shape, dtype=dtype, device=device),
        )

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Stores ``key`` and ``value`` [T, kv_heads, head_dim] from slot ``start`` on."""
        stop = start + key.shape[0]
        self.keys[layer, start:stop, 0] = key
        self.values[layer, start:stop, 0] = value

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of one layer, [slots, 1, kv_heads, head_dim] each."""
        return self.keys[layer], self.values[layer]
