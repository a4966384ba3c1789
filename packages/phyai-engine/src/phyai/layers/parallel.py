"""Linear layers of which every rank of a group holds a part.

Checkpoint tensors are read whole and cut by the weight format, so any format that fits the cuts
works at any degree of parallelism.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phyai.kernels.fp8_rows import RoundedRows
from phyai.layers.linear import Leg, Linear
from phyai_quant.specs.base import LegSlice


@dataclass(frozen=True)
class TensorParallel:
    """A rank of a tensor-parallel group.

    Attributes:
        rank: number of this rank, from 0.
        size: number of ranks.
        group: process group that sums over the ranks; None is the default group.

    Raises:
        ValueError: unless ``0 <= rank < size``.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank is {self.rank}; allowed: 0 to size - 1 with size {self.size}")

    def part(self, total: int, what: str, *, replicas: int = 1) -> tuple[int, int]:
        """Returns start and length of this rank's part of ``total``.

        Args:
            total: size that is divided.
            what: its name, for messages.
            replicas: consecutive ranks that hold the same part.

        Raises:
            ValueError: if the ranks cannot hold equal parts.
        """
        parts = self.size // replicas
        if self.size % replicas or total % parts:
            raise ValueError(
                f"{what} is {total} and cannot be divided among {self.size} ranks; choose a "
                "degree of tensor parallelism that divides it"
            )
        length = total // parts
        return self.rank // replicas * length, length

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns ``x`` summed over the ranks, in place when there are several."""
        if self.size > 1:
            torch.distributed.all_reduce(x, group=self.group)
        return x


class ColumnParallelLinear(Linear):
    """A linear layer whose output features, and bias, are divided among the ranks.

    Args:
        in_features: K.
        out_features: N of the whole layer.
        tp: this rank.
        options: further arguments of `Linear`.

    Raises:
        ValueError: if the ranks cannot hold equal parts.
        QuantConfigError: if a cut goes through a block of the weight's format.
    """

    def __init__(
        self, in_features: int, out_features: int, *, tp: TensorParallel, **options: Any
    ) -> None:
        prefix = options.get("prefix", "")
        start, width = tp.part(out_features, f"{prefix or 'layer'}: N")
        super().__init__(
            in_features,
            width,
            slices=(LegSlice((out_features, in_features), start),),
            **options,
        )


class MergedColumnParallelLinear(Linear):
    """A fused layer of which every leg is divided among the ranks.

    Args:
        in_features: K.
        legs: the whole legs.
        tp: this rank.
        replicas: for each leg, how many consecutive ranks hold the same part; 1 by default.
        options: further arguments of `Linear`.

    Raises:
        ValueError: if the ranks cannot hold equal parts of a leg.
        QuantConfigError: if a cut goes through a block of the weight's format.
    """

    def __init__(
        self,
        in_features: int,
        legs: Sequence[Leg],
        *,
        tp: TensorParallel,
        replicas: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        shared = [1] * len(legs) if replicas is None else replicas
        held: list[Leg] = []
        slices: list[LegSlice] = []
        for leg, copies in zip(legs, shared, strict=True):
            start, width = tp.part(leg.width, f"width of {leg.name}", replicas=copies)
            held.append(replace(leg, width=width))
            slices.append(LegSlice((leg.width, in_features), start))
        super().__init__(in_features, held, slices=slices, **options)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections in one layer, divided among the ranks by heads.

    With more ranks than key and value heads, consecutive ranks share a head.

    Args:
        in_features: K.
        heads: query heads of the whole layer.
        kv_heads: key and value heads of the whole layer.
        head_dim: features of a head.
        tp: this rank.
        options: further arguments of `Linear`.

    Attributes:
        heads: query heads of this rank.
        kv_heads: key and value heads of this rank.

    Raises:
        ValueError: if the ranks cannot hold equal numbers of heads.
    """

    def __init__(
        self,
        in_features: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        tp: TensorParallel,
        **options: Any,
    ) -> None:
        replicas = max(tp.size // kv_heads, 1)
        local_heads = tp.part(heads, "heads")[1]
        local_kv_heads = tp.part(kv_heads, "kv_heads", replicas=replicas)[1]
        legs = (
            Leg("q_proj", heads * head_dim, "q"),
            Leg("k_proj", kv_heads * head_dim, "k"),
            Leg("v_proj", kv_heads * head_dim, "v"),
        )
        super().__init__(in_features, legs, tp=tp, replicas=(1, replicas, replicas), **options)
        self.heads = local_heads
        self.kv_heads = local_kv_heads


class RowParallelLinear(Linear):
    """A linear layer whose input features are divided among the ranks; outputs are summed.

    The bias is on every rank and rank 0 adds it.

    Args:
        in_features: K of the whole layer.
        out_features: N.
        tp: this rank.
        options: further arguments of `Linear`.

    Raises:
        ValueError: if the ranks cannot hold equal parts.
        QuantConfigError: if a cut goes through a block of the weight's format.
    """

    def __init__(
        self, in_features: int, out_features: int, *, tp: TensorParallel, **options: Any
    ) -> None:
        prefix = options.get("prefix", "")
        start, width = tp.part(in_features, f"{prefix or 'layer'}: K")
        super().__init__(
            width,
            out_features,
            slices=(LegSlice((out_features, in_features), 0, start),),
            **options,
        )
        self.tp = tp

    def forward(self, x: Tensor | RoundedRows) -> Tensor:
        """Maps this rank's part of ``x`` [..., K / size] to the sum over the ranks [..., N]."""
        return self.tp.all_reduce(self._multiply(x, self.bias if self.tp.rank == 0 else None))
