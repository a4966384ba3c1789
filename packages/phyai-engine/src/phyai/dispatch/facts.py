"""The vocabulary of facts and the facts of one call.

A fact is a dotted path with a value: ``device.arch = sm90``, ``shape.M = 50``. A path that the
caller did not supply is `MISSING`; a path supplied as None is known to be absent. The two differ:
``quant.layout = None`` says that the weight has no layout.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, StrEnum
from typing import Any, Final

from phyai.dispatch.arch import Arch
from phyai.dispatch.library import library_problem
from phyai.dispatch.names import dtype_name
from phyai.dispatch.types import KernelQuery, freeze


class Missing(Enum):
    """Type of the marker for a fact that was not supplied."""

    MISSING = "missing"

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = Missing.MISSING


class FactKind(StrEnum):
    """How values of a path are normalized and which comparisons it has."""

    INT = "int"
    STR = "str"
    ARCH = "arch"
    DTYPE = "dtype"
    BOOL = "bool"
    STRSET = "strset"
    ANY = "any"


GLOBAL_FACTS: Final[Mapping[str, FactKind]] = {
    "op": FactKind.STR,
    "role": FactKind.STR,
    "device.vendor": FactKind.STR,
    "device.arch": FactKind.ARCH,
    "quant.format": FactKind.DTYPE,
    "quant.layout": FactKind.STR,
    "quant.granularity": FactKind.STR,
    "quant.block_k": FactKind.INT,
    "model.family": FactKind.STR,
    "model.tags": FactKind.STRSET,
}
NAMESPACES: Final = ("device", "quant", "model", "lib", "shape", "dtype", "attrs")
_PREFIX_KINDS: Final = {
    "lib.": FactKind.BOOL,
    "quant.fields.": FactKind.ANY,
    "shape.": FactKind.INT,
    "dtype.": FactKind.DTYPE,
    "attrs.": FactKind.ANY,
}
OP_SCOPED_PREFIXES: Final = ("shape.", "dtype.", "attrs.")
_FALSE_WORDS = frozenset({"0", "false", "no", "off", ""})


def default_kind(path: str) -> FactKind | None:
    """Returns the kind of a path that no operation describes, or None for an unknown path."""
    if path in GLOBAL_FACTS:
        return GLOBAL_FACTS[path]
    for prefix, kind in _PREFIX_KINDS.items():
        if path.startswith(prefix) and len(path) > len(prefix):
            return kind
    return None


def _boolean(value: Any) -> bool:
    return value.strip().lower() not in _FALSE_WORDS if isinstance(value, str) else bool(value)


def _string_set(value: Any) -> frozenset[str]:
    items = [value] if isinstance(value, str) else value
    return frozenset(str(item).lower() for item in items)


_NORMALIZERS: Final[Mapping[FactKind, Callable[[Any], Any]]] = {
    FactKind.INT: int,
    FactKind.STR: lambda value: str(freeze(value)).strip().lower(),
    FactKind.ARCH: lambda value: Arch.parse(value).name,
    FactKind.DTYPE: dtype_name,
    FactKind.BOOL: _boolean,
    FactKind.STRSET: _string_set,
    FactKind.ANY: freeze,
}


def normalize(kind: FactKind, value: Any) -> Any:
    """Returns ``value`` in the canonical form of its kind; None stays None.

    Raises:
        ValueError: if the value has no such form.
    """
    return None if value is None else _NORMALIZERS[kind](value)


class Facts:
    """Facts of one call. Library facts are looked up only when a predicate asks for them.

    Args:
        values: path to raw value.
        kinds: kinds that differ from `default_kind`, such as boolean attributes.
        optional: paths whose absence satisfies a predicate.
        libraries: import names whose ``lib.*`` facts exist.
    """

    __slots__ = ("_kinds", "_libraries", "_optional", "_values")

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        kinds: Mapping[str, FactKind] | None = None,
        optional: Iterable[str] = (),
        libraries: Iterable[str] = (),
    ) -> None:
        self._kinds = kinds or {}
        self._optional = frozenset(optional)
        self._libraries = frozenset(libraries)
        self._values = {path: self._normalize(path, value) for path, value in values.items()}

    def _normalize(self, path: str, value: Any) -> Any:
        kind = self._kinds.get(path) or default_kind(path) or FactKind.ANY
        try:
            return normalize(kind, value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"fact {path!r} has an unusable value {value!r}: {error}") from None

    def get(self, path: str) -> Any:
        """Returns the value of a path, None if known absent, `MISSING` if not supplied."""
        value = self._values.get(path, MISSING)
        if value is MISSING and path.startswith("lib.") and path[4:] in self._libraries:
            value = self._values[path] = library_problem(path[4:]) is None
        return value

    def __getitem__(self, path: str) -> Any:
        value = self.get(path)
        if value is MISSING:
            raise KeyError(path)
        return value

    def optional(self, path: str) -> bool:
        """Whether the absence of this path satisfies a predicate."""
        return path in self._optional

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._values))

    def as_dict(self) -> dict[str, Any]:
        """Returns the facts known so far, sorted by path, sets as sorted lists."""
        return {path: _plain(self._values[path]) for path in self}


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def query_values(query: KernelQuery) -> dict[str, Any]:
    """Flattens a query into path and value pairs."""
    quant = query.quant
    values: dict[str, Any] = {
        "op": query.op,
        "role": query.role,
        "quant.format": quant.format,
        "quant.layout": quant.layout,
        "quant.granularity": quant.granularity,
        "quant.block_k": quant.block_k,
    }
    if query.device is not None:
        values["device.vendor"] = query.device.vendor
        values["device.arch"] = query.device.arch
    if query.model is not None:
        values["model.family"] = query.model.family
        values["model.tags"] = query.model.tags
    values.update((f"quant.fields.{name}", value) for name, value in quant.fields)
    values.update((f"dtype.{name}", value) for name, value in query.dtype)
    values.update((f"shape.{name}", value) for name, value in query.shape.dims)
    values.update((f"attrs.{name}", value) for name, value in query.shape.attrs)
    return values
