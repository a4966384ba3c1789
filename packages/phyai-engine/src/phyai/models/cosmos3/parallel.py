"""Ranks that share one model: tensor parallel within a branch, branches beside each other."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

from phyai.layers import TensorParallel
from phyai.models.cosmos3.state import Modalities


@dataclass(frozen=True)
class Parallel:
    """This process's place among those that serve one request.

    Attributes:
        tp: its part of every layer.
        branch: the guidance branch that it computes when there are as many as ``branches``.
        branches: guidance branches computed at a time, 1 or 2.
        group: process group of the ranks that have the same part of other branches.
    """

    tp: TensorParallel = field(default_factory=TensorParallel)
    branch: int = 0
    branches: int = 1
    group: Any = None

    def __post_init__(self) -> None:
        if self.branches not in (1, 2) or not 0 <= self.branch < self.branches:
            raise ValueError(
                f"branch {self.branch} of {self.branches}; allowed: one branch, or 0 and 1 of 2"
            )

    def exchange(self, mine: Modalities) -> list[Modalities]:
        """Returns the velocities of every branch, given this rank's."""
        flat = torch.cat([part.flatten() for part in mine.parts])
        gathered = [torch.empty_like(flat) for _ in range(self.branches)]
        distributed.all_gather(gathered, flat, group=self.group)
        sizes = [part.numel() for part in mine.parts]

        def rebuild(row: torch.Tensor) -> Modalities:
            left = iter(row.split(sizes))
            return mine.map(lambda part: next(left).view(part.shape))

        return [rebuild(row) for row in gathered]


def join(*, tp_size: int = 1, cfg_size: int = 1) -> Parallel:
    """Returns this process's place in the default process group, and makes the groups it needs.

    Ranks of one branch are neighbours. Every process of the default group must call this.

    Args:
        tp_size: ranks that share a layer.
        cfg_size: guidance branches computed at a time, 1 or 2.

    Raises:
        ValueError: if the group has not ``tp_size * cfg_size`` processes.
    """
    started = distributed.is_available() and distributed.is_initialized()
    world = distributed.get_world_size() if started else 1
    if tp_size < 1 or cfg_size not in (1, 2) or world != tp_size * cfg_size:
        raise ValueError(
            f"{world} processes cannot be tp_size {tp_size} times cfg_size {cfg_size}; start "
            "tp_size * cfg_size processes in one process group, with cfg_size 1 or 2"
        )
    if world == 1:
        return Parallel()
    branch, part = divmod(distributed.get_rank(), tp_size)
    # Every process makes every group, in the same order.
    rows = [
        distributed.new_group([row * tp_size + column for column in range(tp_size)])
        for row in range(cfg_size)
    ]
    columns = [
        distributed.new_group([row * tp_size + column for row in range(cfg_size)])
        for column in range(tp_size)
    ]
    tp = TensorParallel(part, tp_size, rows[branch])
    return Parallel(tp, branch, cfg_size, columns[part])
