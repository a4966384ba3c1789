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
        shape: of the tensor in the checkpoint, where it can have one only.
    """

    key: str
    load: Callable[[Tensor], None]
    aliases: tuple[str, ...] = ()
    optional: bool = False
    shape: tuple[int, ...] | None = None


@runtime_checkable
class HasSlots(Protocol):
    """A module that owns checkpoint tensors."""

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields one slot for each tensor the module expects."""
        ...


def check_unquantized(key: str, source: Tensor) -> None:
    """Refuses integers and 8-bit numbers where plain ones are stored.

    Args:
        key: canonical checkpoint name, for the message.
        source: the tensor.

    Raises:
        CheckpointError: if it is not fp64, fp32, fp16 or bf16.
    """
    if not source.is_floating_point() or source.itemsize < 2:
        raise CheckpointError(
            f"{key}: the checkpoint has {source.dtype}, but this tensor is never quantized; "
            "use a checkpoint that stores it in fp32, fp16 or bf16"
        )


def stored_slot(
    key: str,
    shape: tuple[int, ...],
    fill: Callable[[Tensor], object],
    *,
    aliases: tuple[str, ...] = (),
    optional: bool = False,
) -> TensorSlot:
    """Returns the slot of a tensor that is stored with one shape and never quantized.

    Args:
        key: canonical checkpoint name.
        shape: in the checkpoint.
        fill: converts the tensor and keeps it.
        aliases: as in `TensorSlot`.
        optional: as in `TensorSlot`.
    """

    def load(source: Tensor) -> None:
        check_unquantized(key, source)
        if tuple(source.shape) != shape:
            raise CheckpointError(
                f"{key}: the checkpoint has shape {tuple(source.shape)}, the model needs {shape}"
            )
        fill(source)

    return TensorSlot(key, load, aliases, optional, shape)


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
    shape = tuple(parameter.shape) if whole is None else whole

    def fill(source: Tensor) -> None:
        parameter.data.copy_(source[first_row : first_row + parameter.shape[0]])

    return stored_slot(key, shape, fill, aliases=aliases, optional=optional)


def unused_slot(key: str, shape: tuple[int, ...]) -> TensorSlot:
    """Returns the slot of a tensor that belongs to the model but is never read in this setting.

    Its shape is still checked, so a checkpoint of another model is not mistaken for this one.
    """

    def load(source: Tensor) -> None:
        if tuple(source.shape) != shape:
            raise CheckpointError(
                f"{key}: the checkpoint has shape {tuple(source.shape)}, the model has {shape}"
            )

    return TensorSlot(key, load, shape=shape)


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


def stored_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns the shape in the checkpoint of every tensor that can have one only."""
    return {
        name: slot.shape for name, slot in collect_slots(model).items() if slot.shape is not None
    }
