"""How far the weights of two checkpoints of one model are apart."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from phyai_quant.checkpoint import load_quant_plan
from phyai_quant.matching import strip_root
from phyai_quant.offline.files import Checkpoint, read_checkpoint
from phyai_quant.offline.layers import Layer, decide, find_layers
from phyai_quant.offline.spec_loading import dequantize_layer
from phyai_quant.plan import QuantPlan
from phyai_quant.scheme import QuantConfigError

_CHUNK_ROWS = 1024


@dataclass(frozen=True, slots=True)
class LayerDistance:
    """One layer of both checkpoints.

    Attributes:
        name: Its name in the first checkpoint.
        shape: ``(N, K)`` of its dense weight.
        scheme: What the second checkpoint quantizes it to, in words.
        sqnr_db: ``10 log10(sum a^2 / sum (a - b)^2)``; infinite for equal weights.
        relative_l2: Root of the inverse ratio.
        max_error: Largest ``|a - b|``.
        bits: Stored bits per weight in the second checkpoint, scales included.
    """

    name: str
    shape: tuple[int, int]
    scheme: str
    sqnr_db: float
    relative_l2: float
    max_error: float
    bits: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two checkpoints, layer by layer.

    Attributes:
        layers: Layers of both, in the order of the first.
        only_first: Layers with a weight matrix that the second lacks.
        only_second: The reverse.
        differing: Other tensors (biases, norms) that are not equal.
        equal: Number of other tensors that are.
    """

    layers: tuple[LayerDistance, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    differing: tuple[str, ...]
    equal: int

    @property
    def changed(self) -> tuple[LayerDistance, ...]:
        """The layers whose weights differ at all."""
        return tuple(layer for layer in self.layers if layer.sqnr_db != math.inf)

    @property
    def worst(self) -> LayerDistance | None:
        """The layer with the lowest SQNR, NaN first; None without a layer."""
        keys = {True: -math.inf}
        return min(
            self.layers,
            key=lambda layer: keys.get(math.isnan(layer.sqnr_db), layer.sqnr_db),
            default=None,
        )


def compare_checkpoints(
    first: str | Path, second: str | Path, *, on_progress: Callable[[str], None] | None = None
) -> Comparison:
    """Compares the dequantized weights of two checkpoint folders, one layer at a time.

    Layers pair by name; leading ``model.`` and ``language_model.`` segments may differ.

    Args:
        first: The reference, usually the unquantized checkpoint.
        second: The other one.
        on_progress: Called with the name of each layer when it was compared.

    Raises:
        QuantConfigError: A checkpoint is damaged, has a config or a layer that cannot be read, the
            two weights of a layer have different shapes, or no layer is in both.
    """
    sides = [_Side.read(first), _Side.read(second)]
    rows = []
    for key, layer in sides[0].layers.items():
        other = sides[1].layers.get(key)
        if other is None:
            continue
        rows.append(_distance(sides, layer, other))
        if on_progress is not None:
            on_progress(layer.name)
    if not rows:
        raise QuantConfigError(f"{first} and {second} have no layer in common; compare one model")
    differing, equal = _compare_rest(sides)
    return Comparison(
        tuple(rows),
        tuple(item.name for key, item in sides[0].layers.items() if key not in sides[1].layers),
        tuple(item.name for key, item in sides[1].layers.items() if key not in sides[0].layers),
        differing,
        equal,
    )


@dataclass(frozen=True, slots=True)
class _Side:
    checkpoint: Checkpoint
    plan: QuantPlan | None
    layers: dict[str, Layer]

    @classmethod
    def read(cls, directory: str | Path) -> "_Side":
        checkpoint = read_checkpoint(directory).require_sound()
        layers = {strip_root(layer.name): layer for layer in find_layers(checkpoint.tensors)}
        return cls(checkpoint, load_quant_plan(directory), layers)

    def dense(self, layer: Layer) -> torch.Tensor:
        decision = decide(self.plan, layer)
        if decision.error:
            raise QuantConfigError(f"{self.checkpoint.directory}: {decision.error}")
        return dequantize_layer(layer, decision.scheme)

    def rest(self) -> dict[str, str]:
        owned = {
            layer.full_name(tensor) for layer in self.layers.values() for tensor in layer.tensors
        }
        return {strip_root(name): name for name in self.checkpoint.tensors if name not in owned}


def _distance(sides: list[_Side], layer: Layer, other: Layer) -> LayerDistance:
    reference, approximation = sides[0].dense(layer), sides[1].dense(other)
    if reference.shape != approximation.shape:
        raise QuantConfigError(
            f"{layer.name}: the weights have shapes {list(reference.shape)} and "
            f"{list(approximation.shape)}; compare checkpoints of one model"
        )
    signal = noise = largest = 0.0
    for a, b in zip(reference.split(_CHUNK_ROWS), approximation.split(_CHUNK_ROWS), strict=True):
        error = a.double() - b.double()
        signal += float(a.double().square().sum())
        noise += float(error.square().sum())
        largest = max(largest, float(error.abs().max())) if error.numel() else largest
    scheme = decide(sides[1].plan, other).scheme
    rows, columns = reference.shape
    return LayerDistance(
        layer.name,
        (rows, columns),
        other.weight.dtype.lower() if scheme is None else scheme.weight.describe(),
        _sqnr(signal, noise),
        math.sqrt(noise / signal) if signal else (0.0 if not noise else math.inf),
        largest,
        8 * other.nbytes / max(1, rows * columns),
    )


def _sqnr(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _compare_rest(sides: list[_Side]) -> tuple[tuple[str, ...], int]:
    names, others = sides[0].rest(), sides[1].rest()
    found = list(_differences(sides, names, others))
    return tuple(found), len(names.keys() & others.keys()) - len(found)


def _differences(
    sides: list[_Side], names: dict[str, str], others: dict[str, str]
) -> Iterator[str]:
    for key in names.keys() & others.keys():
        a = sides[0].checkpoint.tensors[names[key]]
        b = sides[1].checkpoint.tensors[others[key]]
        if a.shape != b.shape or not torch.equal(a.read().double(), b.read().double()):
            yield names[key]
