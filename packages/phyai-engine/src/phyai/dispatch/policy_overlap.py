"""Whether two rules can match the same call: a search for facts under which both hold.

A call that is found is a proof: both conditions are evaluated on it, its operation declares every
fact the rules read, its device exists, and some row of the operation could serve it. Finding none
proves nothing; such rules are still compared at every call.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import islice, product
from typing import Any

from phyai.dispatch.arch import PRODUCT_ARCHS, Arch
from phyai.dispatch.catalog import Catalog, OpEntry
from phyai.dispatch.facts import OP_SCOPED_PREFIXES, FactKind, Facts, default_kind
from phyai.dispatch.leaves import AtLeast, Compare, Intersects, Modulus, OneOf
from phyai.dispatch.predicate import And, Const, Leaf, Not, Or, Predicate

_Case = tuple[tuple[Leaf, bool], ...]
"""Leaves that all hold; the flag is False for a leaf that must not hold."""

_CASE_LIMIT = 64
_CALL_LIMIT = 512
_MODULUS_LIMIT = 4096
_DEVICE: tuple[str, ...] = ("device.vendor", "device.arch")
_NO_ARCH = ("cpu", "ascend", "cambricon", "intel", "apple")
_SERIES_VENDORS = {"sm": "nvidia", "gfx": "amd"}


def find_overlap(first: Predicate, second: Predicate, catalog: Catalog) -> dict[str, Any] | None:
    """Returns the facts of a call that both conditions match, or None when none was found.

    Args:
        first: condition of a rule.
        second: condition of another rule.
        catalog: operations that calls can have, and the rows that could serve them.
    """
    both = And((first, second))
    cases = _cases(both, True)
    calls = (
        (op, values)
        for case in cases
        for op in catalog.ops()
        for values in _calls(case, op, catalog.entry(op))
    )
    for op, values in islice(calls, _CALL_LIMIT):
        entry = catalog.entry(op)
        facts = Facts(values, kinds=entry.kinds)
        if both.eval(facts).ok and _servable(entry, facts):
            return values
    return None


def _servable(entry: OpEntry, facts: Facts) -> bool:
    reduced = (impl.when.restrict(facts) for impl in entry.impls)
    return any(not isinstance(rest, Const) or rest.value for rest in reduced)


def _cases(predicate: Predicate, holds: bool) -> list[_Case]:
    """Returns ways in which a predicate can hold, or fail to: at most `_CASE_LIMIT`."""
    if isinstance(predicate, Not):
        return _cases(predicate.part, not holds)
    if isinstance(predicate, Const):
        return [()] if predicate.value is holds else []
    if isinstance(predicate, Leaf):
        return [((predicate, holds),)]
    if not isinstance(predicate, And | Or):
        return []
    if isinstance(predicate, Or) is holds:
        alternatives = [case for part in predicate.parts for case in _cases(part, holds)]
        return alternatives[:_CASE_LIMIT]
    joined: list[_Case] = [()]
    for part in predicate.parts:
        ways = _cases(part, holds)
        joined = [(*left, *right) for left, right in islice(product(joined, ways), _CASE_LIMIT)]
    return joined


def _calls(case: _Case, op: str, entry: OpEntry) -> Iterator[dict[str, Any]]:
    """Yields facts of calls of one operation that satisfy every leaf of a case."""
    leaves: dict[str, list[tuple[Leaf, bool]]] = {}
    for leaf, holds in case:
        leaves.setdefault(leaf.path, []).append((leaf, holds))
    if not _all_hold(leaves.pop("op", []), op):
        return
    device = [leaf for path in _DEVICE for leaf in leaves.pop(path, [])]
    choices: list[list[dict[str, Any]]] = []
    if device:
        choices.append([*_devices(device)])
    for path, tests in leaves.items():
        kind = _kind(path, entry)
        if kind is None:
            return
        values = _candidates(path, kind, tests, entry)
        choices.append([{path: value} for value in values if _all_hold(tests, value)])
    for combination in product(*choices):
        call: dict[str, Any] = {"op": op}
        for part in combination:
            call.update(part)
        yield call


def _kind(path: str, entry: OpEntry) -> FactKind | None:
    """Returns the kind of a path, or None if calls of the operation never state it."""
    if path.startswith("lib."):
        return FactKind.BOOL if path[4:] in entry.libraries else None
    return entry.kinds.get(path) if path.startswith(OP_SCOPED_PREFIXES) else default_kind(path)


def _all_hold(tests: Iterable[tuple[Leaf, bool]], value: Any) -> bool:
    return all((leaf.check(value) is None) is holds for leaf, holds in tests)


def _devices(tests: list[tuple[Leaf, bool]]) -> Iterator[dict[str, Any]]:
    named = [value for leaf, _ in tests if leaf.path == "device.arch" for value in _literals(leaf)]
    archs = dict.fromkeys([*named, *PRODUCT_ARCHS.values()])
    profiles = [(_SERIES_VENDORS[Arch.parse(arch).series], arch) for arch in archs if arch]
    for profile in (*profiles, *((vendor, None) for vendor in _NO_ARCH)):
        values = dict(zip(_DEVICE, profile, strict=True))
        if all(_all_hold([test], values[test[0].path]) for test in tests):
            yield values


def _literals(leaf: Leaf) -> tuple[Any, ...]:
    if isinstance(leaf, OneOf):
        return leaf.values
    if isinstance(leaf, Compare):
        return (leaf.value,)
    return (leaf.bound,) if isinstance(leaf, AtLeast) else ()


def _candidates(
    path: str, kind: FactKind, tests: list[tuple[Leaf, bool]], entry: OpEntry
) -> Iterable[Any]:
    """Returns values of a path worth trying: those named, those rows know, and none."""
    leaves = [leaf for leaf, _ in tests]
    if kind is FactKind.BOOL:
        return (True, False, None)
    if kind is FactKind.STRSET:
        names = [leaf.values for leaf in leaves if isinstance(leaf, Intersects)]
        return (frozenset().union(*names), *names, frozenset(), None)
    named = [value for leaf in leaves for value in _literals(leaf)]
    if kind is FactKind.INT:
        return (*_integers(named, leaves), None)
    known = [value for leaf in _row_leaves(entry) if leaf.path == path for value in _literals(leaf)]
    return dict.fromkeys([*named, *known, "other", None])


def _integers(named: list[Any], leaves: list[Leaf]) -> list[int]:
    bases = {1, *(value for value in named if isinstance(value, int))}
    near = {base + step for base in bases for step in (-1, 0, 1)}
    period = math.lcm(*(leaf.modulus for leaf in leaves if isinstance(leaf, Modulus)))
    if 1 < period <= _MODULUS_LIMIT:
        near.update(base + step for base in bases for step in range(-period, period + 1))
    return sorted((value for value in near if value >= 0), key=lambda value: (value == 0, value))


def _row_leaves(entry: OpEntry) -> Iterator[Leaf]:
    for impl in entry.impls:
        yield from _leaves(impl.when)


def _leaves(predicate: Predicate) -> Iterator[Leaf]:
    if isinstance(predicate, And | Or):
        for part in predicate.parts:
            yield from _leaves(part)
    elif isinstance(predicate, Not):
        yield from _leaves(predicate.part)
    elif isinstance(predicate, Leaf):
        yield predicate
