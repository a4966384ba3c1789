"""Immutable values that describe one call: device, model, shapes and the whole query."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

from phyai.dispatch.names import dtype_name, listing


class KernelMode(StrEnum):
    """How the call runs: directly, under CUDA-graph capture, or in a replay."""

    EAGER = "eager"
    CAPTURE = "capture"
    REPLAY = "replay"

    @classmethod
    def normalize(cls, value: "KernelMode | str") -> "KernelMode":
        """Returns the mode a string names.

        Raises:
            ValueError: for a string that names no mode.
        """
        if isinstance(value, cls):
            return value
        text = str(value).strip().lower().replace("-", "_")
        if text == "graph_capturing":
            return cls.CAPTURE
        try:
            return cls(text)
        except ValueError:
            allowed = listing([*cls, "graph_capturing"])
            raise ValueError(f"mode {value!r} is unknown; allowed: {allowed}") from None


class Profile(StrEnum):
    """How the winner among eligible rows is found: by priority or by measurement."""

    STATIC = "static"
    AUTOTUNE = "autotune"


class Fallback(StrEnum):
    """Whether a reference row may stand in when no chosen row is usable."""

    REFERENCE = "reference"
    ERROR = "error"


@runtime_checkable
class QuantSignature(Protocol):
    """What the dispatcher reads of ``phyai_quant.specs.base.PhysicalSignature``."""

    @property
    def format(self) -> str: ...  # noqa: D102
    @property
    def layout(self) -> str | None: ...  # noqa: D102
    @property
    def block_shape(self) -> tuple[int, int] | None: ...  # noqa: D102
    @property
    def granularity(self) -> str | None: ...  # noqa: D102
    @property
    def fields(self) -> Iterable[tuple[str, Any]]: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The device facts that predicates see.

    Attributes:
        vendor: ``cpu``, ``nvidia``, ``amd``, ``ascend``, ``cambricon``, ``intel`` or ``apple``.
        arch: canonical architecture name such as ``sm90``, or None.
        index: device index, or None. Not part of any choice.
    """

    vendor: str
    arch: str | None = None
    index: int | None = None


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Which model runs, for rules that match ``model.family`` and ``model.tags``."""

    family: str | None = None
    tags: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.family is not None:
            object.__setattr__(self, "family", self.family.strip().lower())
        tags = [self.tags] if isinstance(self.tags, str) else self.tags
        object.__setattr__(self, "tags", frozenset(str(tag).lower() for tag in tags))


@dataclass(frozen=True, slots=True)
class ShapeFacts:
    """Dimensions and attributes of a call, as sorted pairs."""

    dims: tuple[tuple[str, int | None], ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def build(
        cls, shape: Mapping[str, Any] | None, attrs: Mapping[str, Any] | None = None
    ) -> "ShapeFacts":
        """Splits a flat mapping: integers become dims, booleans and the rest attributes."""
        dims: dict[str, int | None] = {}
        extra: dict[str, Any] = {}
        for name, value in (shape or {}).items():
            if isinstance(value, Integral) and not isinstance(value, bool):
                dims[name] = int(value)
            elif value is None:
                dims[name] = None
            else:
                extra[name] = value
        extra.update(attrs or {})
        return cls(
            tuple(sorted(dims.items())),
            tuple(sorted((name, freeze(value)) for name, value in extra.items())),
        )


def freeze(value: Any) -> Any:
    """Returns a hashable equivalent: enums unwrapped, lists as tuples, mappings as pairs."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), freeze(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, set | frozenset):
        return frozenset(freeze(item) for item in value)
    return value


@dataclass(frozen=True, slots=True)
class QuantFacts:
    """The part of a weight's physical signature that predicates see."""

    format: str | None = None
    layout: str | None = None
    granularity: str | None = None
    block_k: int | None = None
    fields: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def build(cls, quant: QuantSignature | Mapping[str, Any] | None) -> "QuantFacts":
        """Reads a signature object or a mapping with the same field names.

        Raises:
            TypeError: for anything else.
        """
        if quant is None:
            return cls()
        if isinstance(quant, Mapping):

            def get(name: str) -> Any:
                return quant.get(name)
        elif hasattr(quant, "format"):

            def get(name: str) -> Any:
                return getattr(quant, name, None)
        else:
            raise TypeError(
                f"quant must be a PhysicalSignature or a mapping, got {type(quant).__name__}"
            )
        fmt, block = get("format"), get("block_shape")
        fields = get("fields") or ()
        pairs = fields.items() if isinstance(fields, Mapping) else fields
        return cls(
            format=None if fmt is None else dtype_name(fmt),
            layout=_lower(get("layout")),
            granularity=_lower(get("granularity")),
            block_k=int(block[1]) if block is not None else None,
            fields=tuple(sorted((str(name), _lower(value)) for name, value in pairs)),
        )


def _lower(value: Any) -> Any:
    value = freeze(value)
    return value.lower() if isinstance(value, str) else value


@dataclass(frozen=True)
class KernelQuery:
    """One request for a kernel. Build it with `KernelQuery.build`.

    Attributes:
        op: operation name.
        role: what the call site is in its model, such as ``expert``.
        device: device profile; None means the selector's own device.
        model: model context; None means the selector's own.
        dtype: sorted pairs of dtype role and canonical name.
        quant: facts of the weight's physical format.
        shape: dims and attributes.
        mode: eager, capture or replay.
    """

    op: str
    role: str = ""
    device: DeviceProfile | None = None
    model: ModelContext | None = None
    dtype: tuple[tuple[str, str | None], ...] = ()
    quant: QuantFacts = QuantFacts()
    shape: ShapeFacts = ShapeFacts()
    mode: KernelMode = KernelMode.EAGER
    cache_key: tuple[Any, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        device = self.device and (self.device.vendor, self.device.arch)
        key = (self.op, self.role, device, self.model, self.dtype, self.quant, self.shape)
        object.__setattr__(self, "cache_key", (*key, self.mode))

    @classmethod
    def build(
        cls,
        op: str,
        *,
        role: str = "",
        device: Any = None,
        model: ModelContext | None = None,
        dtype: Any = None,
        quant: QuantSignature | Mapping[str, Any] | None = None,
        shape: Mapping[str, Any] | None = None,
        dims: Mapping[str, Any] | None = None,
        mode: KernelMode | str = KernelMode.EAGER,
        attrs: Mapping[str, Any] | None = None,
    ) -> "KernelQuery":
        """Builds a query from plain values.

        Args:
            op: operation name.
            role: call-site role.
            device: anything `probe_device` takes; None leaves the selector's device.
            model: None leaves the selector's model.
            dtype: mapping of dtype role to dtype; a single dtype means ``{"input": dtype}``.
            quant: physical signature of the weight, a mapping with its fields, or None.
            shape: mapping of dims; booleans and other values in it become attributes.
            dims: another name for ``shape``; both may be given.
            mode: execution mode.
            attrs: mapping of attributes.

        Raises:
            ValueError: for an unknown mode or device.
            TypeError: for a quantization signature of a wrong type.
        """
        from phyai.dispatch.device import probe_device

        if dtype is not None and not isinstance(dtype, Mapping):
            dtype = {"input": dtype}
        dtypes = tuple(
            sorted((k, None if v is None else dtype_name(v)) for k, v in (dtype or {}).items())
        )
        return cls(
            op=op.strip().lower(),
            role=role.strip().lower(),
            device=None if device is None else probe_device(device),
            model=model,
            dtype=dtypes,
            quant=QuantFacts.build(quant),
            shape=ShapeFacts.build({**(shape or {}), **(dims or {})}, attrs),
            mode=KernelMode.normalize(mode),
        )
