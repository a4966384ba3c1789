"""What quantizing a checkpoint will do, decided and checked before anything is written."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from phyai_quant.checkpoint import check_unquantized_dtypes, load_quant_plan
from phyai_quant.offline.encoding import Encoder, make_encoder
from phyai_quant.offline.files import DTYPES, Checkpoint
from phyai_quant.offline.layers import Decision, Layer, decide, find_layers
from phyai_quant.offline.rotated import METADATA_KEY
from phyai_quant.offline.shapes import Layout
from phyai_quant.offline.shard_writer import TensorInfo
from phyai_quant.offline.written_config import check_one_family, compressed_tensors_config
from phyai_quant.plan import QuantPlan
from phyai_quant.rules import Rule
from phyai_quant.scheme import QuantConfigError, QuantScheme

_SHOWN = 20
_SOURCES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class LayerWork:
    """One layer that will be quantized.

    Attributes:
        layer: The dense layer.
        scheme: What it becomes, as a scheme that is quantized on disk.
        encoder: What computes its tensors.
        layout: Dtype and shape of each of its tensors.
    """

    layer: Layer
    scheme: QuantScheme
    encoder: Encoder
    layout: Layout

    @property
    def nbytes(self) -> int:
        """Bytes of the quantized tensors."""
        return sum(_nbytes(info) for info in self.layout.values())


@dataclass(frozen=True)
class Work:
    """What quantizing a checkpoint will do.

    Attributes:
        checkpoint: The dense checkpoint.
        plan: The plan that was asked for.
        layers: The layers that will be quantized, by the name of their dense weight.
        kept: Layers with a weight matrix that stay as they are, and why.
        convrot: True for ConvRot weights, False for compressed-tensors.
        unmatched: Rules of the plan that match no layer.
    """

    checkpoint: Checkpoint
    plan: QuantPlan
    layers: Mapping[str, LayerWork]
    kept: Mapping[str, str]
    convrot: bool
    unmatched: tuple[Rule, ...]

    @property
    def schemes(self) -> dict[str, QuantScheme]:
        """Name and scheme of every layer that will be quantized."""
        return {work.layer.name: work.scheme for work in self.layers.values()}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of the whole quantized checkpoint."""
        dense = sum(work.layer.weight.nbytes for work in self.layers.values())
        return self.checkpoint.nbytes - dense + sum(work.nbytes for work in self.layers.values())

    @property
    def fingerprint(self) -> str:
        """Changes with the plan and with the files of the source."""
        files = [
            [shard.name, shard.stat().st_size, shard.stat().st_mtime_ns]
            for shard in self.checkpoint.shards
        ]
        text = json.dumps([self.plan.as_dict(), files], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def tensors_of(self, names: list[str]) -> dict[str, TensorInfo]:
        """Returns dtype and shape of what the dense tensors ``names`` become."""
        found: dict[str, TensorInfo] = {}
        for name in names:
            work = self.layers.get(name)
            if work is None:
                entry = self.checkpoint.tensors[name]
                found[name] = (DTYPES[entry.dtype], entry.shape)
            else:
                found |= {work.layer.full_name(key): info for key, info in work.layout.items()}
        return found

    def metadata_of(self, shard: str, names: list[str]) -> dict[str, str]:
        """Returns the header entries of a shard: those of the source, and ConvRot markers."""
        metadata = dict(self.checkpoint.metadata[shard])
        if self.convrot:
            markers = {
                self.layers[name].layer.name: self.layers[name].encoder.marker  # pyright: ignore[reportAttributeAccessIssue]
                for name in names
                if name in self.layers
            }
            entry = {"format_version": "1.0", "layers": markers}
            metadata[METADATA_KEY] = json.dumps(entry, separators=(",", ":"))
        return metadata

    def quantization_config(self) -> dict[str, Any] | None:
        """Returns the config to write; None for ConvRot, whose markers describe the weights."""
        if self.convrot:
            return None
        linear = [name for name, why in self.kept.items() if why != "embedding"]
        return compressed_tensors_config(self.schemes, linear)


def plan_work(checkpoint: Checkpoint, plan: QuantPlan) -> Work:
    """Decides what happens to every layer of a dense checkpoint.

    Raises:
        QuantConfigError: The checkpoint is damaged or already quantized; the plan does not fit a
            layer, in which case every such layer is listed; nothing would be quantized.
    """
    checkpoint.require_sound()
    _require_dense(checkpoint)
    found = find_layers(checkpoint.tensors)
    works: dict[str, LayerWork] = {}
    kept: dict[str, str] = {}
    problems: list[str] = []
    for layer in found:
        decision = decide(plan, layer)
        try:
            work = _layer_work(layer, decision)
        except QuantConfigError as error:
            text = str(error).removeprefix(f"{layer.name}: ")
            problems.append(f"{layer.name} {list(layer.weight.shape)}: {text}")
            continue
        if work is None:
            kept[layer.name] = decision.rule
        else:
            works[layer.full_name("weight")] = work
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise QuantConfigError(
            "the policy does not fit the checkpoint:\n  " + "\n  ".join(problems[:_SHOWN]) + more
        )
    if not works:
        raise QuantConfigError(
            f"the policy quantizes no layer of {checkpoint.directory}; its layers with a weight "
            f"matrix: {', '.join(list(kept)[:_SHOWN]) or 'none'}; rules match these names, which "
            "are the checkpoint's, and not those of an engine's fused layers"
        )
    schemes = {work.layer.name: work.scheme for work in works.values()}
    classes = {layer.name: layer.module_cls for layer in found}
    return Work(checkpoint, plan, works, kept, check_one_family(schemes), plan.unmatched(classes))


def _layer_work(layer: Layer, decision: Decision) -> LayerWork | None:
    if decision.error:
        raise QuantConfigError(decision.error)
    if decision.scheme is None:
        return None
    if layer.weight.dtype not in _SOURCES:
        raise QuantConfigError(
            f"the weight is {layer.weight.dtype}; quantizable: {', '.join(_SOURCES)}"
        )
    rows, columns = layer.weight.shape
    if not rows or not columns:
        raise QuantConfigError("the weight is empty; keep it unquantized with 'scheme: null'")
    scheme = replace(decision.scheme, online=False)
    encoder = make_encoder(scheme, DTYPES[layer.weight.dtype])
    return LayerWork(layer, scheme, encoder, encoder.layout(rows, columns))


def _require_dense(checkpoint: Checkpoint) -> None:
    if load_quant_plan(checkpoint.directory) is not None:
        raise QuantConfigError(
            f"{checkpoint.directory}: the checkpoint declares a quantization already; quantize "
            "the unquantized checkpoint it was made from"
        )
    dtypes = {name: entry.dtype for name, entry in checkpoint.tensors.items()}
    check_unquantized_dtypes(dtypes, None)
    unknown = [name for name, dtype in dtypes.items() if dtype not in DTYPES]
    if unknown:
        raise QuantConfigError(
            f"{unknown[0]}: dtype {dtypes[unknown[0]]} cannot be copied; known: {', '.join(DTYPES)}"
        )


def _nbytes(info: TensorInfo) -> int:
    count = 1
    for size in info[1]:
        count *= size
    return count * info[0].itemsize
