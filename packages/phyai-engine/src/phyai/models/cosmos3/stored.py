"""What the folder of a part stores: its sizes, and tensors that layers keep in another layout."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def read_config(directory: Path) -> dict[str, Any]:
    """Returns ``config.json`` of a folder.

    Raises:
        CheckpointError: if there is none, or it is not a JSON object.
    """
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; pass the folder that holds it") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold an object, it holds a {type(values).__name__}")
    return values
