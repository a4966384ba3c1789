"""Places for stored tensors that a layer keeps in another layout."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from phyai.checkpoints import CheckpointError, TensorSlot, collect_slots


@dataclass(frozen=True)
class StoredSlot(TensorSlot):
    """A slot that also tells the stored shape.

    Attributes:
        shape: of the tensor in the checkpoint.
    """

    shape: tuple[int, ...] = ()


def stored_slot(key: str, shape: tuple[int, ...], fill: Callable[[Tensor], object]) -> StoredSlot:
    """Returns the slot of a tensor that is stored with ``shape`` and that ``fill`` converts."""

    def load(source: Tensor) -> None:
        if not source.is_floating_point() or source.itemsize < 2:
            raise CheckpointError(
                f"{key}: the checkpoint has {source.dtype}; this layer needs fp32, fp16 or bf16"
            )
        if tuple(source.shape) != shape:
            raise CheckpointError(
                f"{key}: the checkpoint has shape {tuple(source.shape)}, the model needs {shape}"
            )
        fill(source)

    return StoredSlot(key, load, shape=shape)


def stored_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns the stored shape of every tensor of a model whose slots are all `StoredSlot`."""
    return {
        name: slot.shape
        for name, slot in collect_slots(model).items()
        if isinstance(slot, StoredSlot)
    }
