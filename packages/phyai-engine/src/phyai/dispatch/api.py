"""Functions on top of the selector: select, explain, freeze all, parameter dtypes."""

from collections.abc import Mapping, Sequence
from typing import Any

from phyai.dispatch.bootstrap import get_kernel_selector
from phyai.dispatch.call import current_mode, live_call_sites
from phyai.dispatch.errors import FrozenChoiceError
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.names import dtype_name
from phyai.dispatch.opspec import Impl
from phyai.dispatch.predicate import Const
from phyai.dispatch.selection import Selection
from phyai.dispatch.trace import SelectionTrace
from phyai.dispatch.types import KernelQuery

_HINT_BONUS = 20


def select(op: str, *, prefer: Sequence[str] = (), mode: Any = None, **facts: Any) -> Selection:
    """Returns the prepared row for facts given as in `KernelQuery.build`."""
    query = KernelQuery.build(op, mode=current_mode() if mode is None else mode, **facts)
    return get_kernel_selector().select(query, tuple(prefer))


def explain(
    op: str, *, prefer: Sequence[str] = (), mode: Any = None, **facts: Any
) -> SelectionTrace:
    """Returns what `select` would choose for the same facts, and why.

    Args:
        op: operation name.
        prefer: ids a call site would hint at.
        mode: execution mode; None is the mode in force.
        **facts: ``role``, ``device`` (also synthetic, such as ``"nvidia:sm90"``), ``model``,
            ``dtype``, ``quant``, ``dims`` or ``shape``, ``attrs``.

    Raises:
        UnknownOperationError: if there is no such operation.
        PolicyError: if rules of the policy conflict on this call.
    """
    query = KernelQuery.build(op, mode=current_mode() if mode is None else mode, **facts)
    return get_kernel_selector().explain(query, tuple(prefer))


def freeze_kernel_choices() -> dict[str, int]:
    """Freezes every live call site that can be, and counts the outcome.

    Returns:
        Counts under ``frozen``, ``polymorphic`` (several choices in one mode) and ``cold``.
    """
    counts = {"frozen": 0, "polymorphic": 0, "cold": 0}
    for site in live_call_sites():
        try:
            site.freeze()
        except FrozenChoiceError:
            counts["cold" if site.cold else "polymorphic"] += 1
        else:
            counts["frozen"] += 1
    return counts


def unfreeze_kernel_choices() -> None:
    """Returns every live call site to keyed choices."""
    for site in live_call_sites():
        site.unfreeze()


def backend_preference(op: str, backend: str | None) -> tuple[str, ...]:
    """Returns the row ids of a backend as a hint for `CallSite`; none for None or ``auto``.

    Raises:
        ValueError: if the operation has no such backend.
    """
    if backend is None or backend == "auto":
        return ()
    return get_kernel_selector().catalog.ids_for_backend(op, backend)


def param_dtypes(
    op: str,
    *,
    activation: Any,
    known: Mapping[str, Any] | None = None,
    preferred: Any = None,
    prefer: Sequence[str] = (),
) -> dict[str, str]:
    """Returns in which dtype each declared parameter should be allocated.

    For each parameter the first of (preferred, activation, bf16, fp16, fp32) is taken that keeps
    the highest-ranked row usable, given the device, the libraries and the known facts.

    Args:
        op: operation name.
        activation: dtype of the activation.
        known: further facts by path.
        preferred: dtype to try first.
        prefer: ids ranked above all others.

    Raises:
        ValueError: if no dtype satisfies any row.
    """
    selector = get_kernel_selector()
    entry = selector.catalog.entry(op)
    act = dtype_name(activation)
    device = selector.device
    values = {"device.vendor": device.vendor, "device.arch": device.arch, "dtype.input": act}
    facts = Facts({**values, **(known or {})}, kinds=entry.kinds, libraries=entry.libraries)
    viable = [impl for impl in entry.impls if not _impossible(impl, facts)] or [*entry.impls]
    tried: dict[str, None] = dict.fromkeys(
        [*([dtype_name(preferred)] if preferred is not None else []), act, "bf16", "fp16", "fp32"]
    )
    chosen: dict[str, str] = {}
    for name in entry.spec.params:
        ranked = [
            (max(_rank(impl, prefer) for impl in allowing), dtype)
            for dtype in tried
            if (allowing := [impl for impl in viable if _allows(impl, name, dtype, act, facts)])
        ]
        if not ranked:
            raise ValueError(f"no dtype of {list(tried)} suits parameter {name!r} of {op!r}")
        best = max(rank for rank, _ in ranked)
        chosen[name] = next(dtype for rank, dtype in ranked if rank == best)
    return chosen


def _rank(impl: Impl, prefer: Sequence[str]) -> int:
    return impl.priority + (_HINT_BONUS if impl.kernel_id in prefer else 0)


def _impossible(impl: Impl, facts: Facts) -> bool:
    reduced = impl.when.restrict(facts)
    return isinstance(reduced, Const) and not reduced.value


def _allows(impl: Impl, name: str, dtype: str, activation: str, facts: Facts) -> bool:
    rule = impl.params.get(name)
    if rule is not None and not rule.allows(dtype, activation):
        return False
    path = f"dtype.{name}"
    stated = Facts({path: dtype}, kinds={path: FactKind.DTYPE})
    return not _impossible(impl, stated) and not _impossible(impl, facts)
