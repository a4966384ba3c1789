"""What causal layers remember of a clip between its chunks."""

from torch import Tensor, nn


class Stream:
    """Last frames that each causal layer has seen: the whole state of one clip.

    A clip goes through the layers in chunks, the first of one frame. A layer finds here what it
    stored at the chunk before, and nothing at the first one.
    """

    def __init__(self) -> None:
        self._frames: dict[nn.Module, Tensor] = {}

    def get(self, layer: nn.Module) -> Tensor | None:
        """Returns the frames that ``layer`` stored last, or None at its first chunk."""
        return self._frames.get(layer)

    def put(self, layer: nn.Module, frames: Tensor) -> None:
        """Keeps ``frames`` for the next chunk of ``layer``, in memory of their own."""
        owned = frames.untyped_storage().nbytes() == frames.nbytes
        self._frames[layer] = frames if owned else frames.clone()

    @property
    def bytes(self) -> int:
        """Memory that the state holds."""
        return sum(frames.untyped_storage().nbytes() for frames in self._frames.values())
