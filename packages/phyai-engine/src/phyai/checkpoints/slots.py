"""The places of a model that a checkpoint fills."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from phyai.checkpoints.errors import CheckpointError


@dataclass(frozen=True)
class TensorSlot:
    """One checkpoint tensor that a module expects.

    Attributes:
        key: canonical checkpoint name.
        load: copies the tensor into the module; raises when the shape does not fit.
        aliases: names of a tied tensor, such as an output head, read only if ``key`` is absent.
        optional: whether the model is complete without it.
    """

    key: str
    load: Callable[[Tensor], None]
    aliases: tuple[str, ...] = ()
    optional: bool = False


@runtime_checkable
class HasSlots(Protocol):
    """A module that owns checkpoint tensors."""

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields one slot for each tensor the module expects."""
        ...


def copy_slot(
    key: str,
    parameter: nn.Parameter,
    *,
    aliases: tuple[str, ...] = (),
    optional: bool = False,
    whole: tuple[int, ...] | None = None,
    first_row: int = 0,
) -> TensorSlot:
    """Returns the slot of a parameter that is stored exactly as it is used.

    Args:
        key: canonical checkpoint name.
        parameter: is filled.
        aliases: as in `TensorSlot`.
        optional: as in `TensorSlot`.
        whole: shape in the checkpoint if the parameter is a part of it.
        first_row: first row of that part.
    """
    expected = tuple(parameter.shape) if whole is None else whole

    def load(source: Tensor) -> None:
        if not source.is_floating_point() or source.itemsize < 2:
            raise CheckpointError(
                f"{key}: the checkpoint has {source.dtype}, but this tensor is never quantized; "
                "use a checkpoint that stores it in fp32, fp16 or bf16"
            )
        if tuple(source.shape) != expected:
            raise CheckpointError(
                f"{key}: the checkpoint has shape {tuple(source.shape)}, the model needs {expected}"
            )
        parameter.data.copy_(source[first_row : first_row + parameter.shape[0]])

    return TensorSlot(key, load, aliases, optional)


def unused_slot(key: str, shape: tuple[int, ...]) -> TensorSlot:
    """Returns the slot of a tensor that belongs to the model but is never read in this setting.

    Its shape is still checked, so a checkpoint of another model is not mistaken for this one.
    """

    def load(source: Tensor) -> None:
        if tuple(source.shape) != shape:
            raise CheckpointError(
                f"{key}: the checkpoint has shape {tuple(source.shape)}, the model has {shape}"
            )

    return TensorSlot(key, load)


def collect_slots(model: nn.Module) -> dict[str, TensorSlot]:
    """Returns every slot of ``model`` by key and by alias.

    Raises:
        CheckpointError: if two modules claim the same tensor.
    """
    slots: dict[str, TensorSlot] = {}
    for module in model.modules():
        if not isinstance(module, HasSlots):
            continue
        for slot in module.checkpoint_slots():
            for name in (slot.key, *slot.aliases):
                if name in slots:
                    raise CheckpointError(f"two modules of the model claim the tensor {name}")
                slots[name] = slot
    return slots
