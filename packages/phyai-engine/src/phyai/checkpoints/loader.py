"""Fills a model from a checkpoint and accounts for every tensor."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from phyai.checkpoints.errors import CheckpointError
from phyai.checkpoints.slots import TensorSlot, collect_slots

_SHOWN = 12


@runtime_checkable
class HasPostLoad(Protocol):
    """A module that finishes its weights once all of them are there."""

    def missing_parts(self) -> list[str]:
        """Returns checkpoint tensors of this module that were never loaded."""
        ...

    def post_load(self) -> None:
        """Quantizes, packs or checks the weights; called once, in module order."""
        ...


@dataclass
class LoadReport:
    """What a load did.

    Attributes:
        loaded: names of the tensors that went into the model.
        tied: aliases that the file stores beside their tensor; the tensor itself was used.
    """

    loaded: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    shown = "".join(f"\n    {name}" for name in names[:_SHOWN])
    return shown + (f"\n    ... and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _missing(model: nn.Module, slots: Mapping[str, TensorSlot], filled: set[str]) -> set[str]:
    missing = {s.key for s in slots.values() if not s.optional and s.key not in filled}
    for module in model.modules():
        if isinstance(module, HasPostLoad):
            missing.update(module.missing_parts())
    return missing


def load_into(
    model: nn.Module, tensors: Mapping[str, Callable[[], Tensor]], *, source: str
) -> LoadReport:
    """Loads ``tensors`` into ``model`` strictly and finishes its modules.

    Args:
        model: modules that describe their tensors through ``checkpoint_slots``.
        tensors: canonical name to a function that reads the tensor.
        source: what to call the checkpoint in errors.

    Returns:
        A report of what was loaded.

    Raises:
        CheckpointError: if tensors are missing, unexpected, or misshapen. All
            problems are listed at once and no module is finished.
    """
    slots = collect_slots(model)
    report = LoadReport()
    filled: set[str] = set()
    refused: set[str] = set()
    problems: list[str] = []
    unexpected = [name for name in tensors if name not in slots]
    with torch.no_grad():
        for name, slot in _in_order(slots, tensors):
            if slot.key in filled:
                report.tied.append(name)
                continue
            try:
                slot.load(tensors[name]())
            except ValueError as error:
                problems.append(str(error))
                refused.add(slot.key)
            filled.add(slot.key)
            report.loaded.append(name)
    missing = _missing(model, slots, filled) - refused
    _raise_if_incomplete(source, missing, unexpected, problems)
    for module in model.modules():
        if isinstance(module, HasPostLoad):
            module.post_load()
    return report


def _in_order(
    slots: Mapping[str, TensorSlot], tensors: Mapping[str, Callable[[], Tensor]]
) -> Iterator[tuple[str, TensorSlot]]:
    for name, slot in slots.items():
        if name in tensors:
            yield name, slot


def _raise_if_incomplete(
    source: str, missing: set[str], unexpected: list[str], problems: list[str]
) -> None:
    parts = []
    if missing:
        parts.append(f"  {len(missing)} missing:{_listed(missing)}")
    if unexpected:
        parts.append(f"  {len(unexpected)} unexpected:{_listed(unexpected)}")
    if problems:
        parts.append(f"  {len(problems)} wrong:{_listed(problems)}")
    if parts:
        raise CheckpointError(f"{source} does not fit the model\n" + "\n".join(parts))
