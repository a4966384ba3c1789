"""Weight formats that schemes name: those that other packages add, and one of this package."""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, NoReturn

from phyai_quant.scheme import QuantConfigError, QuantScheme

if TYPE_CHECKING:
    from phyai_quant.specs.base import WeightSpec

ENTRY_POINT_GROUP = "phyai_quant.specs"
"""Packages add formats under this entry-point group. The value is a function
``build(scheme: QuantScheme, sm: int | None) -> WeightSpec | None``, which is asked for the schemes
whose ``stored_by`` is the name of the entry point: its answers are those of a module of
`materialize`."""

BUILT_IN = (EntryPoint("fp8_rows", "phyai_quant.specs.fp8_rows:build", ENTRY_POINT_GROUP),)
"""Formats of this package that a scheme has to name because another format comes first."""

_MEMBERS = (
    "spec_id",
    "weight_dtype",
    "physical_signature",
    "tensor_names",
    "allocate",
    "load_weight",
    "process_after_loading",
    "dequantize_weight",
    "missing_parts",
)


def build_installed(scheme: QuantScheme, sm: int | None) -> "WeightSpec":
    """Returns the spec of a scheme that an installed format stores.

    Args:
        scheme: A scheme with ``stored_by``.
        sm: NVIDIA SM version of the target; None without an NVIDIA GPU.

    Raises:
        QuantConfigError: No installed package, or more than one, has a format of that name; it
            cannot be imported, refuses the scheme, or answers with something that is no spec.
    """
    entry = _entry(scheme)
    try:
        build: Callable[[QuantScheme, int | None], WeightSpec | None] = entry.load()
    except Exception as error:
        _fail(entry, f"cannot be imported: {error!r}; repair or remove the package", error)
    spec = build(scheme, sm)
    if spec is None:
        target = "without an NVIDIA GPU" if sm is None else f"on SM{sm}"
        _fail(entry, f"does not store {scheme.describe()} {target}; change the plan's scheme")
    absent = [name for name in _MEMBERS if not hasattr(spec, name)]
    if absent:
        _fail(
            entry,
            f"returned {type(spec).__name__}, which lacks {', '.join(absent)}; see "
            "phyai_quant.specs.base.WeightSpec",
        )
    return spec


def _entry(scheme: QuantScheme) -> EntryPoint:
    installed = (*BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP))
    found = [entry for entry in installed if entry.name == scheme.stored_by]
    if len(found) == 1:
        return found[0]
    if found:
        places = ", ".join(entry.value for entry in found)
        raise QuantConfigError(
            f"weight format {scheme.stored_by!r} is installed more than once ({places}); keep one"
        )
    names = ", ".join(sorted({entry.name for entry in installed}))
    raise QuantConfigError(
        f"weight format {scheme.stored_by!r} is not installed; installed: {names}. Packages add "
        f"formats through the entry-point group {ENTRY_POINT_GROUP}"
    )


def _fail(entry: EntryPoint, problem: str, cause: Exception | None = None) -> NoReturn:
    raise QuantConfigError(f"weight format {entry.name!r} ({entry.value}) {problem}") from cause
