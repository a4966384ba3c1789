"""Which parts of a layer have arrived: the state that weight formats keep on it while they load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phyai_quant.scheme import QuantConfigError

if TYPE_CHECKING:
    from torch import nn

    from phyai_quant.specs import base


@dataclass(slots=True)
class LoadState:
    """Which parts of a layer have arrived.

    Attributes:
        request: What was allocated.
        parts: Names of the required tensors of every leg.
        loaded: Pairs of tensor name and index of the leg.
        finished: True after `WeightSpec.process_after_loading`.
    """

    request: base.AllocationRequest
    parts: tuple[str, ...]
    loaded: set[tuple[str, int]] = field(default_factory=set)
    finished: bool = False

    def rows(self, leg: int) -> slice:
        """Returns the rows of the weight that leg number ``leg`` owns."""
        start = sum(self.request.logical_widths[:leg])
        return slice(start, start + self.request.logical_widths[leg])

    def missing(self, prefix: str) -> list[str]:
        """Returns ``<prefix>.<tensor>`` of absent parts, with the leg's id when there are many."""
        ids = self.request.shard_ids
        return [
            f"{prefix}.{part}" + (f"[{ids[leg]}]" if len(ids) > 1 else "")
            for part in self.parts
            for leg in range(len(ids))
            if (part, leg) not in self.loaded
        ]


def layer_name(layer: nn.Module) -> str:
    """Returns the layer's ``prefix``, or its class name when it has none."""
    return getattr(layer, "prefix", "") or type(layer).__name__


def attach_state(
    layer: nn.Module, request: base.AllocationRequest, parts: Sequence[str]
) -> LoadState:
    """Puts a fresh `LoadState` and the leg widths on the layer."""
    state = LoadState(request, tuple(parts))
    layer.weight_load_state = state  # pyright: ignore[reportArgumentType]
    layer.logical_widths = request.logical_widths  # pyright: ignore[reportArgumentType]
    return state


def load_state(layer: nn.Module) -> LoadState:
    """Returns the layer's `LoadState`; QuantConfigError before `WeightSpec.allocate`."""
    state = getattr(layer, "weight_load_state", None)
    if not isinstance(state, LoadState):
        raise QuantConfigError(f"{layer_name(layer)}: allocate the weight before loading into it")
    return state


def legs_of(layer: nn.Module, shard_id: base.ShardId) -> range:
    """Returns the indices of the legs that ``shard_id`` names; None names the whole layer."""
    ids = load_state(layer).request.shard_ids
    if shard_id is None:
        return range(len(ids))
    if shard_id not in ids:
        raise QuantConfigError(
            f"{layer_name(layer)}: unknown leg {shard_id!r}; allowed: {', '.join(map(repr, ids))}"
        )
    leg = ids.index(shard_id)
    return range(leg, leg + 1)


def row_span(layer: nn.Module, legs: range) -> slice:
    """Returns the rows of consecutive legs."""
    state = load_state(layer)
    return slice(state.rows(legs[0]).start, state.rows(legs[-1]).stop)


def check_tensor_name(layer: nn.Module, name: str, allowed: Sequence[str]) -> None:
    """Raises QuantConfigError when the spec has no use for a tensor called ``name``."""
    if name not in allowed:
        raise QuantConfigError(
            f"{layer_name(layer)}: cannot use checkpoint tensor {name!r} with this format; "
            f"allowed: {', '.join(allowed)}"
        )


def check_complete(layer: nn.Module) -> None:
    """Raises QuantConfigError listing every part that was never loaded."""
    missing = load_state(layer).missing(layer_name(layer))
    if missing:
        raise QuantConfigError(
            "quantized tensors were never loaded: "
            + ", ".join(missing)
            + "; the checkpoint must hold all of them"
        )


def check_finished(layer: nn.Module) -> None:
    """Raises QuantConfigError before `WeightSpec.process_after_loading`."""
    if not load_state(layer).finished:
        raise QuantConfigError(
            f"{layer_name(layer)}: call process_after_loading before reading the weight"
        )
