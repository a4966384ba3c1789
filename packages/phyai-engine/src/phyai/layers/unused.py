"""The place of a linear layer that a checkpoint holds and the model does not compute."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from phyai.checkpoints.slots import TensorSlot, unused_slot
from phyai.layers.linear import Linear
from phyai_quant import get_active_plan, materialize


class UnusedLinear(nn.Module):
    """Accepts the tensors of a linear layer, in the format that the active plan names, unread.

    Args:
        name: checkpoint name of the layer.
        shape: (N, K).
        prefix: name that plans match, of the fused layer that it belongs to.
        stored: as in `Linear`.
    """

    def __init__(
        self, name: str, shape: tuple[int, int], *, prefix: str, stored: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.name = name
        self.shape = shape
        plan = get_active_plan()
        scheme = None if plan is None else plan.resolve(prefix, Linear, stored=stored)
        packed = scheme is not None and not scheme.online
        self._tensors = materialize(scheme).tensor_names() if packed else ()
        self._seen = False

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields every tensor that the layer may have."""
        if not self._tensors:
            yield unused_slot(f"{self.name}.weight", self.shape)
        for tensor in self._tensors:
            yield TensorSlot(f"{self.name}.{tensor}", self._see, optional=True)

    def _see(self, source: Tensor) -> None:
        del source
        self._seen = True

    def missing_parts(self) -> list[str]:
        """Returns the weight when the checkpoint has nothing of a quantized layer."""
        return [f"{self.name}.weight"] if self._tensors and not self._seen else []

    def post_load(self) -> None:
        """Does nothing: no tensor is kept."""
