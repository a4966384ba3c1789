"""The catalog: every operation and every implementation that exists."""

import fnmatch
import hashlib
import importlib
import json
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from phyai.dispatch.facts import OP_SCOPED_PREFIXES, FactKind, Facts, default_kind, query_values
from phyai.dispatch.names import listing, suggest_name
from phyai.dispatch.opspec import Impl, OpSpec
from phyai.dispatch.types import KernelQuery

OP_MODULES = (
    "activated_product",
    "activation",
    "attention",
    "attention_gdn",
    "attention_paged",
    "attention_segments",
    "conv",
    "decoder_layers",
    "embedding",
    "flow_velocity",
    "gated_product",
    "gemm",
    "join_heads",
    "modulation",
    "norm",
    "norm_fused",
    "qk_norm",
    "rope",
    "triton_rows",
)


class _NamedKeyError(KeyError):
    def __str__(self) -> str:
        return str(self.args[0])


class UnknownOperationError(_NamedKeyError):
    """No operation of this name."""


class UnknownKernelError(_NamedKeyError):
    """No row of this id."""


class OpEntry:
    """One operation with its rows, and what is derived from them."""

    def __init__(self, spec: OpSpec) -> None:
        self.spec = spec
        self.impls: tuple[Impl, ...] = ()
        self.kinds: dict[str, FactKind] = spec.paths()
        self.optional: frozenset[str] = spec.optional_paths()

    @cached_property
    def paths(self) -> frozenset[str]:
        """Every path the rows read."""
        return frozenset().union(*(impl.when.facts_used() for impl in self.impls))

    @cached_property
    def libraries(self) -> frozenset[str]:
        """Libraries the rows ask for."""
        return frozenset().union(*(impl.libraries() for impl in self.impls))

    def add(self, impl: Impl) -> None:
        """Inserts a row by descending priority, then id."""
        rows = [*self.impls, impl]
        self.impls = tuple(sorted(rows, key=lambda row: (-row.priority, row.kernel_id)))
        for name in ("paths", "libraries"):
            self.__dict__.pop(name, None)

    def facts(self, query: KernelQuery) -> Facts:
        """Returns the facts of a query on this operation."""
        return Facts(
            query_values(query),
            kinds=self.kinds,
            optional=self.optional,
            libraries=self.libraries,
        )


class Catalog:
    """Operations and rows. Registration is checked; `revision` counts it."""

    def __init__(self) -> None:
        self._ops: dict[str, OpEntry] = {}
        self._impls: dict[str, Impl] = {}
        self._version: str | None = None
        self.revision: int = 0

    def register_op(self, spec: OpSpec) -> None:
        """Adds an operation.

        Raises:
            ValueError: if the name is taken.
        """
        if spec.name in self._ops:
            raise ValueError(f"operation {spec.name!r} is already registered")
        self._ops[spec.name] = OpEntry(spec)
        self._changed()

    def register(self, impl: Impl) -> None:
        """Adds a row.

        Raises:
            UnknownOperationError: if its operation is not registered.
            ValueError: if the id is taken, or the condition reads undeclared facts, or only
                optional ones, which would make the row unconditional.
        """
        entry = self.entry(impl.op)
        if impl.kernel_id in self._impls:
            raise ValueError(f"row {impl.kernel_id!r} is already registered")
        used = impl.when.facts_used()
        for path in sorted(used):
            scoped = path.startswith(OP_SCOPED_PREFIXES)
            if (path not in entry.kinds) if scoped else (default_kind(path) is None):
                raise ValueError(
                    f"row {impl.kernel_id!r} reads {path!r}, which operation {impl.op!r} does not "
                    f"declare{suggest_name(path, entry.kinds)}"
                )
        if used <= entry.optional:
            raise ValueError(
                f"row {impl.kernel_id!r} constrains only optional facts; it would always be chosen"
            )
        unknown = set(impl.params) - set(entry.spec.params)
        if unknown:
            raise ValueError(
                f"row {impl.kernel_id!r}: {sorted(unknown)[0]!r} is no parameter of {impl.op!r}; "
                f"declared: {listing(entry.spec.params)}"
            )
        self._impls[impl.kernel_id] = impl
        entry.add(impl)
        self._changed()

    def _changed(self) -> None:
        self.revision += 1
        self._version = None

    def ops(self) -> tuple[str, ...]:
        """Names of the operations, sorted."""
        return tuple(sorted(self._ops))

    def entry(self, op: str) -> OpEntry:
        """Returns an operation with its rows.

        Raises:
            UnknownOperationError: with a suggestion.
        """
        entry = self._ops.get(op)
        if entry is None:
            raise UnknownOperationError(
                f"unknown operation {op!r}{suggest_name(op, self._ops)} "
                f"(known: {listing(self._ops)})"
            )
        return entry

    def spec(self, op: str) -> OpSpec:
        """Returns the schema of an operation."""
        return self.entry(op).spec

    def impls(self, op: str) -> tuple[Impl, ...]:
        """Returns the rows of an operation by descending priority, then id."""
        return self.entry(op).impls

    def impl(self, kernel_id: str) -> Impl:
        """Returns a row by id, in any case.

        Raises:
            UnknownKernelError: with a suggestion.
        """
        impl = self._impls.get(kernel_id.lower())
        if impl is None:
            raise UnknownKernelError(
                f"unknown kernel {kernel_id!r}{suggest_name(kernel_id, self._impls)}"
            )
        return impl

    def match_ids(self, pattern: str) -> tuple[str, ...]:
        """Returns the ids a glob matches, in catalog priority order within each operation."""
        pattern = pattern.lower()
        return tuple(
            impl.kernel_id
            for op in self.ops()
            for impl in self.impls(op)
            if fnmatch.fnmatchcase(impl.kernel_id, pattern)
        )

    def backends(self, op: str) -> tuple[str, ...]:
        """Returns the backend names of an operation, sorted."""
        return tuple(sorted({impl.backend for impl in self.impls(op)}))

    def ids_for_backend(self, op: str, backend: str) -> tuple[str, ...]:
        """Returns a backend's row ids by priority.

        Raises:
            ValueError: if the operation has no row of that backend.
        """
        name = backend.strip().lower().replace("-", "_")
        ids = tuple(impl.kernel_id for impl in self.impls(op) if impl.backend == name)
        if not ids:
            raise ValueError(
                f"operation {op!r} has no backend {backend!r}; known: {listing(self.backends(op))}"
            )
        return ids

    def libraries(self, op: str | None = None) -> tuple[str, ...]:
        """Returns the libraries that rows ask for, of one operation or of all."""
        ops = self.ops() if op is None else (op,)
        return tuple(sorted({name for each in ops for name in self.entry(each).libraries}))

    def coverage_gaps(self) -> tuple[str, ...]:
        """Returns operations that need a reference row and have none."""
        return tuple(
            op
            for op in self.ops()
            if self.spec(op).requires_reference
            and not any(impl.reference for impl in self.impls(op))
        )

    def manifest(self) -> list[dict[str, Any]]:
        """Returns one JSON-able entry per row, sorted by id; equal catalogs give equal bytes."""
        return [
            {
                "id": impl.kernel_id,
                "op": impl.op,
                "priority": int(impl.priority),
                "reference": impl.reference,
                "capture_safe": impl.capture_safe,
                "explicit": impl.explicit,
                "when": impl.condition,
                "params": {name: rule.rule for name, rule in sorted(impl.params.items())},
                "accepts": sorted(impl.accepts),
            }
            for _, impl in sorted(self._impls.items())
        ]

    def describe(self) -> str:
        """Returns one line per row: op, priority, id, condition."""
        rows = [impl for op in self.ops() for impl in self.impls(op)]
        return "\n".join(
            f"{row.op:16} {int(row.priority):2} {row.kernel_id:36} {row.condition}" for row in rows
        )

    @property
    def version(self) -> str:
        """First 16 hex digits of the SHA-256 of the manifest."""
        if self._version is None:
            text = json.dumps(self.manifest(), sort_keys=True, separators=(",", ":"))
            self._version = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._version


def build_catalog(extra: Iterable[Callable[[Catalog], None]] = ()) -> Catalog:
    """Returns a new catalog with every operation of ``phyai.kernels``.

    Building imports no optional library. Packages add operations and rows through the entry-point
    group ``phyai.kernels``, whose entries are ``populate(catalog)`` functions.

    Args:
        extra: further ``populate`` functions, called last.

    Raises:
        ValueError: if an operation lacks a reference row.
        RuntimeError: if the kernels of an installed package cannot be added.
    """
    from importlib.metadata import entry_points

    catalog = Catalog()
    for name in OP_MODULES:
        importlib.import_module(f"phyai.kernels.{name}").populate(catalog)
    for entry in sorted(entry_points(group="phyai.kernels"), key=lambda item: item.name):
        try:
            entry.load()(catalog)
        except Exception as error:
            package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "a package"
            raise RuntimeError(
                f"{package} offers kernels by the entry point '{entry.name} = {entry.value}', "
                f"which cannot be added: {type(error).__name__}: {error}; repair or uninstall it"
            ) from error
    for populate in extra:
        populate(catalog)
    gaps = catalog.coverage_gaps()
    if gaps:
        raise ValueError(f"operations without a reference row: {listing(gaps)}")
    return catalog
