"""Declarations: what an operation is (`OpSpec`) and one implementation of it (`Impl`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

from phyai.dispatch.bench_inputs import BenchInputs
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.names import dtype_name
from phyai.dispatch.predicate import Predicate

Prepare = Callable[[Facts, Mapping[str, Any]], Callable[..., Any]]


class Priority(IntEnum):
    """Bands of row priority; rows add small offsets."""

    REFERENCE = 0
    GENERAL = 4
    OPTIMIZED = 8
    SPECIALIZED = 12
    PLUGIN = 16


@dataclass(frozen=True)
class ParamContract:
    """Which dtype a parameter must be allocated in for a row to run.

    Build one with `any_float`, `matches_activation` or `fixed`.

    Attributes:
        rule: ``any_float``, ``matches_activation`` or the fixed dtype's name.
    """

    rule: str

    @classmethod
    def any_float(cls) -> "ParamContract":
        """Any floating dtype."""
        return cls("any_float")

    @classmethod
    def matches_activation(cls) -> "ParamContract":
        """The dtype of the activation."""
        return cls("matches_activation")

    @classmethod
    def fixed(cls, dtype: Any) -> "ParamContract":
        """Exactly this dtype."""
        return cls(dtype_name(dtype))

    def allows(self, dtype: str, activation: str) -> bool:
        """Whether a parameter of ``dtype`` satisfies the contract."""
        if self.rule == "any_float":
            return True
        return dtype == (activation if self.rule == "matches_activation" else self.rule)


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """Schema of an operation: the facts a call may state and how the prepared callable is called.

    Attributes:
        name: lower-case id.
        dims: names legal under ``shape.``.
        optional_dims: dims whose absence satisfies a predicate.
        dtypes: dtype roles every call states.
        optional_dtypes: dtype roles a call may leave out.
        attributes: attributes every call states, with their kinds.
        optional_attributes: attributes a call may leave out, with their kinds.
        signature: calling convention of the prepared callable, as text.
        params: parameters whose allocation dtype depends on the chosen row.
        requires_reference: whether the catalog must hold a reference row.
        bench_args: makes the arguments of a measurement from facts and a torch device: positional
            ones as a tuple, or `BenchInputs`.
        doc: what the operation computes.
    """

    name: str
    dims: tuple[str, ...] = ()
    optional_dims: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    optional_dtypes: tuple[str, ...] = ()
    attributes: Mapping[str, FactKind] = field(default_factory=dict)
    optional_attributes: Mapping[str, FactKind] = field(default_factory=dict)
    signature: str = ""
    params: tuple[str, ...] = ()
    requires_reference: bool = True
    bench_args: Callable[[Facts, Any], tuple[Any, ...] | BenchInputs] | None = None
    doc: str = ""

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.lower():
            raise ValueError(f"operation name {self.name!r} must be a non-empty lower-case id")
        for what, required, optional in (
            ("dimension", self.dims, self.optional_dims),
            ("dtype role", self.dtypes, self.optional_dtypes),
            ("attribute", self.attributes, self.optional_attributes),
        ):
            both = set(required) & set(optional)
            if both:
                raise ValueError(
                    f"operation {self.name!r}: {what} {sorted(both)[0]!r} is both required and "
                    "optional"
                )

    def paths(self) -> dict[str, FactKind]:
        """Returns the op-scoped paths this operation declares, with their kinds."""
        paths = {f"shape.{name}": FactKind.INT for name in (*self.dims, *self.optional_dims)}
        for name in (*self.dtypes, *self.optional_dtypes):
            paths[f"dtype.{name}"] = FactKind.DTYPE
        for name, kind in (*self.attributes.items(), *self.optional_attributes.items()):
            paths[f"attrs.{name}"] = kind
        return paths

    def optional_paths(self) -> frozenset[str]:
        """Returns the paths whose absence satisfies a predicate."""
        return frozenset(
            [
                *(f"shape.{name}" for name in self.optional_dims),
                *(f"dtype.{name}" for name in self.optional_dtypes),
                *(f"attrs.{name}" for name in self.optional_attributes),
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Impl:
    """One row of the catalog: an implementation and when it is valid.

    Attributes:
        kernel_id: dotted id; its first component is the backend.
        op: operation name.
        when: the complete condition under which the row may run, libraries included.
        prepare: makes the callable from facts and policy params; imports libraries here.
        priority: 0 to 19; see `Priority`.
        reference: whether the row may stand in as fallback.
        capture_safe: whether it may run inside CUDA-graph capture.
        explicit: whether it changes results, so that only a policy rule that names it chooses it.
        params: parameter name to dtype contract.
        accepts: names of policy params that ``prepare`` understands.
        check_params: raises ValueError or TypeError for bad values of policy params.
        metadata: free-form notes, not part of any fingerprint.
    """

    kernel_id: str
    op: str
    when: Predicate
    prepare: Prepare
    priority: int
    reference: bool = False
    capture_safe: bool = True
    explicit: bool = False
    params: Mapping[str, ParamContract] = field(default_factory=dict)
    accepts: tuple[str, ...] = ()
    check_params: Callable[[Mapping[str, Any]], None] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        backend, _, rest = self.kernel_id.partition(".")
        if not backend or not rest or self.kernel_id != self.kernel_id.lower():
            raise ValueError(
                f"kernel id {self.kernel_id!r} must be lower-case and dotted, such as "
                "'torch.rmsnorm'"
            )
        if not 0 <= self.priority < 20:
            raise ValueError(f"row {self.kernel_id!r}: priority {self.priority} is not in 0..19")

    @property
    def backend(self) -> str:
        """First component of the id."""
        return self.kernel_id.partition(".")[0]

    @cached_property
    def condition(self) -> str:
        """The rendered condition."""
        return self.when.render()

    def libraries(self) -> frozenset[str]:
        """Import names of the libraries the condition asks for."""
        return frozenset(p[4:] for p in self.when.facts_used() if p.startswith("lib."))
