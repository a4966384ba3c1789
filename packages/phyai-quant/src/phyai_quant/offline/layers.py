"""Groups the tensors of a checkpoint into layers and asks a plan about each."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from phyai_quant.offline.files import TensorEntry
from phyai_quant.plan import QuantPlan
from phyai_quant.scheme import QDType, QuantConfigError, QuantScheme

QUANT_TENSORS = (
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "pre_quant_scale",
    "comfy_quant",
)
"""Last components of tensors that only quantized layers have."""

_WEIGHTS = ("weight", "weight_packed")
_EMBEDDING = re.compile(r"(?:^|_)embed(?:ding)?s?(?:_tokens|_positions)?(?:_\d+)?$|^wte$|^wpe$")
_HIGH_PRECISION = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with a weight matrix.

    Attributes:
        name: Dotted name.
        tensors: Last component of each of its weight and quantization tensors, to the tensor.
        module_cls: ``Linear``, or ``Embedding`` by its name.
    """

    name: str
    tensors: Mapping[str, TensorEntry]
    module_cls: str

    @property
    def weight(self) -> TensorEntry:
        """The tensor of codes or of plain values."""
        return next(self.tensors[name] for name in _WEIGHTS if name in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and of its quantization tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def quantized_on_disk(self) -> bool:
        """True when the stored weight is no 16- or 32-bit float."""
        return self.weight.dtype not in _HIGH_PRECISION

    def full_name(self, tensor: str) -> str:
        """Returns the checkpoint name of one of its tensors."""
        return f"{self.name}.{tensor}" if self.name else tensor


@dataclass(frozen=True, slots=True)
class Decision:
    """What a plan says about a layer.

    Attributes:
        scheme: Its scheme; None is unquantized.
        rule: The matcher that decided (without its pattern when that is the layer's own name),
            ``default``, or why no plan applies.
        source: Where the rule was written; empty without a rule.
        error: Why there is no answer, such as legs that disagree; empty otherwise.
    """

    scheme: QuantScheme | None
    rule: str
    source: str = ""
    error: str = ""


def find_layers(tensors: Mapping[str, TensorEntry]) -> list[Layer]:
    """Returns the layers that own a 2-D weight or a packed one, in the order of the files.

    Checkpoints do not name module classes: a layer is taken as an embedding when the last
    component of its name says so (``embed_tokens``, ``word_embeddings``, ``wte``), else as linear.
    """
    groups: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in tensors.items():
        prefix, _, last = name.rpartition(".")
        if last in _WEIGHTS or last in QUANT_TENSORS:
            groups.setdefault(prefix, {})[last] = entry
    return [
        Layer(name, parts, module_class(name)) for name, parts in groups.items() if _matrix(parts)
    ]


def orphans(tensors: Mapping[str, TensorEntry], layers: Iterable[Layer]) -> list[str]:
    """Returns quantization tensors that belong to no layer with a weight matrix."""
    owners = {layer.name for layer in layers}
    split = ((name, *name.rpartition(".")[::2]) for name in tensors)
    return [name for name, prefix, last in split if last in QUANT_TENSORS and prefix not in owners]


def module_class(name: str) -> str:
    """Returns ``Embedding`` or ``Linear``, judged by the last component of a layer's name."""
    return "Embedding" if _EMBEDDING.search(name.rpartition(".")[2]) else "Linear"


def decide(plan: QuantPlan | None, layer: Layer) -> Decision:
    """Returns the plan's decision for a layer; an error becomes part of the decision.

    Embeddings look up rows and are quantized by no plan.
    """
    if plan is None:
        return Decision(None, "no quantization config")
    if layer.module_cls == "Embedding":
        return Decision(None, "embedding")
    try:
        resolution = plan.explain(layer.name, layer.module_cls)
        scheme = resolution.scheme
    except QuantConfigError as error:
        return Decision(None, "", error=str(error))
    rule = resolution.legs[0].rule
    if rule is None:
        return Decision(scheme, "default")
    matcher = rule.matcher
    pattern = "" if matcher.pattern == layer.name else f" {matcher.pattern}"
    return Decision(scheme, f"{matcher.kind.value}{pattern}", rule.source)


def logical_shape(layer: Layer, scheme: QuantScheme | None) -> tuple[int, int]:
    """Returns ``(N, K)`` of the dense weight behind the stored one.

    Raises:
        QuantConfigError: The stored shapes allow no such reading.
    """
    declared = layer.tensors.get("weight_shape")
    if declared is not None:
        sizes = declared.read().flatten().tolist()
        if len(sizes) != 2 or any(int(size) != size or size < 1 for size in sizes):
            raise QuantConfigError(
                f"{layer.full_name('weight_shape')}: {sizes} is not two positive sizes [N, K]"
            )
        return int(sizes[0]), int(sizes[1])
    rows, columns = layer.weight.shape
    return rows, columns * _values_per_element(layer, scheme)


def _values_per_element(layer: Layer, scheme: QuantScheme | None) -> int:
    dtype = layer.weight.dtype
    if dtype == "U8":
        return 2
    if dtype != "I32":
        return 1
    if scheme is None or scheme.weight.dtype not in (QDType.INT4, QDType.INT8):
        raise QuantConfigError(
            f"{layer.name}: the weight is packed in 32-bit words, but no rule of the config says "
            "int4 or int8; correct the config"
        )
    return 8 if scheme.weight.dtype is QDType.INT4 else 4


def _matrix(parts: Mapping[str, TensorEntry]) -> bool:
    weight = next((parts[name] for name in _WEIGHTS if name in parts), None)
    return weight is not None and len(weight.shape) == 2
