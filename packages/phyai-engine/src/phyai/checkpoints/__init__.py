"""Reading model weights: strict, safetensors only, every tensor accounted for."""

from phyai.checkpoints.errors import CheckpointError
from phyai.checkpoints.loader import LoadReport, load_into
from phyai.checkpoints.reader import CheckpointReader
from phyai.checkpoints.slots import TensorSlot, collect_slots

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "LoadReport",
    "TensorSlot",
    "collect_slots",
    "load_into",
]
