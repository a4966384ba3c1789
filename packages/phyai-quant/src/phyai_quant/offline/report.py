"""One row per layer: what a plan decides for it and what that costs."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phyai_quant.checkpoint import load_quant_plan
from phyai_quant.materialize import materialize
from phyai_quant.offline.files import Checkpoint, read_checkpoint
from phyai_quant.offline.layers import Layer, decide, find_layers, logical_shape
from phyai_quant.offline.work import plan_work
from phyai_quant.plan import QuantPlan
from phyai_quant.scheme import QuantConfigError, QuantScheme

_BYTES_OF_16_BIT = 2


@dataclass(frozen=True, slots=True)
class LayerRow:
    """What is known about one layer without reading its weight.

    Attributes:
        name: Its dotted name.
        shape: ``(N, K)`` of the dense weight.
        rule: The rule that decided.
        source: Where it was written.
        scheme: The scheme; None is unquantized.
        spec: Id of the weight format, or why there is none; the dtype of an unquantized layer.
        stored: Dtype of the stored weight.
        before: Bytes of the dense weight.
        after: Bytes of the quantized tensors.
    """

    name: str
    shape: tuple[int, ...]
    rule: str
    source: str
    scheme: QuantScheme | None
    spec: str
    stored: str
    before: int
    after: int

    @property
    def summary(self) -> str:
        """The scheme in a few words, such as ``int8 per_channel / int8``."""
        if self.scheme is None:
            return "-"
        weight, act = self.scheme.weight, self.scheme.input
        text = weight.describe().removesuffix(" micro-scaled")
        if act is None:
            return f"{text} / a16"
        return f"{text} / {act.dtype.value}{'' if act.dynamic else ' static'}"

    def as_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "rule": self.rule,
            "source": self.source,
            "scheme": None if self.scheme is None else self.scheme.as_dict(),
            "summary": self.summary,
            "format": self.spec,
            "stored": self.stored,
            "before": self.before,
            "after": self.after,
        }


def inspect_checkpoint(
    directory: str | Path, policy: QuantPlan | None = None, sm: int | None = None
) -> tuple[list[LayerRow], int]:
    """Returns a row for each layer with a weight matrix, and the bytes of all other tensors.

    Args:
        directory: The checkpoint folder.
        policy: When given, the rows show what quantizing with it would give.
        sm: NVIDIA SM version whose weight formats are shown; None is the portable ones.

    Raises:
        QuantConfigError: The checkpoint is damaged, its config is refused, or the policy does not
            fit it. A layer that no weight format stores is no error: its row says why.
    """
    checkpoint = read_checkpoint(directory).require_sound()
    if policy is not None:
        rows = list(_planned_rows(checkpoint, policy, sm))
    else:
        rows = list(_stored_rows(checkpoint, load_quant_plan(directory), sm))
    owned = sum(layer.nbytes for layer in find_layers(checkpoint.tensors))
    return rows, checkpoint.nbytes - owned


def _stored_rows(
    checkpoint: Checkpoint, plan: QuantPlan | None, sm: int | None
) -> Iterator[LayerRow]:
    for layer in find_layers(checkpoint.tensors):
        decision = decide(plan, layer)
        shape, spec = layer.weight.shape, decision.error
        if not decision.error:
            shape, spec = _describe(layer, decision.scheme, sm)
        before = layer.nbytes
        if decision.scheme is not None or layer.quantized_on_disk:
            before = _BYTES_OF_16_BIT * shape[0] * shape[1]
        yield LayerRow(
            layer.name,
            shape,
            decision.rule,
            decision.source,
            decision.scheme,
            spec,
            layer.weight.dtype,
            before,
            layer.nbytes,
        )


def _planned_rows(checkpoint: Checkpoint, policy: QuantPlan, sm: int | None) -> Iterator[LayerRow]:
    work = plan_work(checkpoint, policy)
    for layer in find_layers(checkpoint.tensors):
        planned = work.layers.get(layer.full_name("weight"))
        scheme = None if planned is None else planned.scheme
        decision = decide(policy, layer)
        yield LayerRow(
            layer.name,
            layer.weight.shape,
            decision.rule,
            decision.source,
            scheme,
            layer.weight.dtype.lower() if scheme is None else _spec_id(scheme, sm),
            layer.weight.dtype,
            layer.nbytes,
            layer.nbytes if planned is None else planned.nbytes,
        )


def _describe(
    layer: Layer, scheme: QuantScheme | None, sm: int | None
) -> tuple[tuple[int, ...], str]:
    try:
        shape = logical_shape(layer, scheme)
        return shape, layer.weight.dtype.lower() if scheme is None else _spec_id(scheme, sm)
    except QuantConfigError as error:
        return layer.weight.shape, str(error)


def _spec_id(scheme: QuantScheme, sm: int | None) -> str:
    try:
        return materialize(scheme, sm).spec_id
    except QuantConfigError as error:
        return f"none: {error}"
