"""Memory that a TMA descriptor is made of without holding its tensor."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Address:
    """Memory, as far as a descriptor asks for it; it keeps nothing alive."""

    start: int
    dtype: torch.dtype = torch.int8

    def data_ptr(self) -> int:
        """Return where the memory starts."""
        return self.start
