"""Functions on top of the selector: select, explain, freeze all, parameter dtypes."""

from collections.abc import Mapping, Sequence
from typing import Any

from phyai.dispatch.bootstrap import get_kernel_selector
from phyai.dispatch.call import current_mode, live_call_sites
from phyai.dispatch.catalog import OpEntry
from phyai.dispatch.errors import FrozenChoiceError
from phyai.dispatch.facts import FactKind, Facts, query_values
from phyai.dispatch.names import dtype_name
from phyai.dispatch.opspec import Impl
from phyai.dispatch.predicate import Const
from phyai.dispatch.selection import Selection
from phyai.dispatch.selector import Selector
from phyai.dispatch.trace import SelectionTrace
from phyai.dispatch.types import Fallback, KernelQuery

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
    role: str = "",
    device: Any = None,
    known: Mapping[str, Any] | None = None,
    preferred: Any = None,
    prefer: Sequence[str] = (),
) -> dict[str, str]:
    """Returns in which dtype each declared parameter should be allocated.

    For each parameter the first of (preferred, activation, bf16, fp16, fp32) is taken that keeps
    the highest-ranked row usable, given the policy, the device, the libraries and the known facts.
    Where a rule of the policy matches, its rows come first, in their order.

    Args:
        op: operation name.
        activation: dtype of the activation.
        role: role of the call site.
        device: where the parameters live; None is the selector's device.
        known: further facts by path.
        preferred: dtype to try first.
        prefer: ids ranked above all others, unless a policy rule matches.

    Raises:
        ValueError: if no dtype satisfies any row.
        PolicyError: if policy rules conflict on this call.
    """
    selector = get_kernel_selector()
    entry = selector.catalog.entry(op)
    act = dtype_name(activation)
    query = KernelQuery.build(
        op,
        role=role,
        device=selector.device if device is None else device,
        model=selector.model,
        dtype={"input": act},
    )
    values = {**query_values(query), **(known or {})}
    facts = Facts(values, kinds=entry.kinds, optional=entry.optional, libraries=entry.libraries)
    ranks = _ranks(selector, entry, facts, prefer)
    # When no row can run, the call will say so; its parameters exist until then.
    viable = [pair for pair in ranks if not _impossible(pair[1], facts)] or ranks
    tried: dict[str, None] = dict.fromkeys(
        [*([dtype_name(preferred)] if preferred is not None else []), act, "bf16", "fp16", "fp32"]
    )
    chosen: dict[str, str] = {}
    for name in entry.spec.params:
        ranked = [
            (max(allowing), dtype)
            for dtype in tried
            if (allowing := [rank for rank, impl in viable if _allows(impl, name, dtype, act)])
        ]
        if not ranked:
            raise ValueError(f"no dtype of {list(tried)} suits parameter {name!r} of {op!r}")
        best = max(rank for rank, _ in ranked)
        chosen[name] = next(dtype for rank, dtype in ranked if rank == best)
    return chosen


def _ranks(
    selector: Selector, entry: OpEntry, facts: Facts, prefer: Sequence[str]
) -> list[tuple[int, Impl]]:
    """Returns the rows that may be chosen and their ranks: by the policy, else by priority."""
    decision = selector.policy.decide(facts, selector.catalog)
    if decision.rule is None:
        hinted = dict.fromkeys(prefer, _HINT_BONUS)
        return [(impl.priority + hinted.get(impl.kernel_id, 0), impl) for impl in entry.impls]
    last = len(decision.candidates)
    named = {kernel_id: last - place for place, kernel_id in enumerate(decision.candidates)}
    stand_in = not decision.strict and decision.fallback is Fallback.REFERENCE
    return [
        (named.get(impl.kernel_id, 0), impl)
        for impl in entry.impls
        if impl.kernel_id in named or (stand_in and impl.reference)
    ]


def _impossible(impl: Impl, facts: Facts) -> bool:
    reduced = impl.when.restrict(facts)
    return isinstance(reduced, Const) and not reduced.value


def _allows(impl: Impl, name: str, dtype: str, activation: str) -> bool:
    rule = impl.params.get(name)
    if rule is not None and not rule.allows(dtype, activation):
        return False
    path = f"dtype.{name}"
    stated = Facts({path: dtype}, kinds={path: FactKind.DTYPE})
    return not _impossible(impl, stated)
