"""Parsing ``rules`` and ``overrides`` of a policy."""

from collections.abc import Mapping
from typing import Any

from phyai.dispatch.catalog import Catalog, UnknownKernelError
from phyai.dispatch.conditions import one_of
from phyai.dispatch.matcher import MatcherCompiler
from phyai.dispatch.names import listing, suggest_name
from phyai.dispatch.policy import Rule
from phyai.dispatch.policy_overlap import find_overlap
from phyai.dispatch.policy_yaml import Document, Path_
from phyai.dispatch.predicate import And, Const, Predicate, all_of
from phyai.dispatch.types import Fallback

_RULE_FIELDS = ("id", "priority", "match", "prefer", "restrict_to", "params", "fallback")
_OVERRIDE_FIELDS = ("id", "priority", "match", "use", "restrict_to", "params")
_PIN = "; a pin is an entry of 'overrides' with 'use'"
_ADVICE = {
    ("rules", "pin"): _PIN,
    ("rules", "use"): _PIN,
    ("overrides", "pin"): "; did you mean 'use'?",
    ("overrides", "prefer"): "; an override is strict, 'prefer' belongs to 'rules'",
    ("overrides", "fallback"): "; an override is strict, 'fallback' belongs to 'rules'",
}
"""What to say about words that are right elsewhere."""


class RuleParser:
    """Parses the rule lists of one document.

    Args:
        document: the policy.
        catalog: the rows and operations that rules may name.
    """

    def __init__(self, document: Document, catalog: Catalog) -> None:
        self._document = document
        self._catalog = catalog
        self._matchers = MatcherCompiler(document, catalog)
        self._ids: dict[str, Path_] = {}

    def parse(self, key: str) -> tuple[Rule, ...]:
        """Parses ``rules`` or ``overrides``.

        Raises:
            PolicyError: for any malformed, duplicate or contradictory entry.
        """
        entries = self._document.data.get(key)
        if entries is None:
            return ()
        if not isinstance(entries, list):
            self._document.fail((key,), f"must be a list of mappings, got {entries!r}")
        rules = [self._rule(entry, key, index) for index, entry in enumerate(entries)]
        self._refuse_conflicts(rules, key)
        return tuple(rules)

    def _rule(self, entry: Any, key: str, index: int) -> Rule:
        path: Path_ = (key, index)
        strict = key == "overrides"
        if not isinstance(entry, Mapping):
            self._document.fail(path, f"must be a mapping, got {entry!r}")
        fields = _OVERRIDE_FIELDS if strict else _RULE_FIELDS
        for name in entry:
            if name not in fields:
                hint = _ADVICE.get((key, name)) or suggest_name(name, fields)
                self._document.fail(
                    (*path, name),
                    f"unknown field {name!r}{hint} (allowed: {', '.join(fields)})",
                )
        rule_id = self._id(entry, path, f"{'override' if strict else 'rule'}-{index}")
        choices = ("use", "restrict_to") if strict else ("prefer", "restrict_to")
        given = [name for name in choices if entry.get(name) is not None]
        if len(given) != 1:
            self._document.fail(
                path, f"{rule_id!r} needs exactly one of {' and '.join(choices)}, got {given}"
            )
        match, op = self._matchers.compile(
            {} if entry.get("match") is None else entry["match"], (*path, "match")
        )
        ids = self._named_ids(entry[given[0]], given[0], path)
        match = self._scope(match, op.spec.name if op else None, ids, (*path, given[0]))
        params = self._params(entry.get("params"), ids, (*path, "params"))
        pattern = str(entry["restrict_to"]).lower() if given[0] == "restrict_to" else None
        return Rule(
            id=rule_id,
            priority=self._priority(entry.get("priority", 0), path),
            match=match,
            prefer=ids if given[0] == "prefer" else (),
            restrict_to=pattern,
            use=ids[0] if given[0] == "use" else None,
            params=params,
            fallback=self.fallback(entry.get("fallback"), (*path, "fallback")),
            strict=strict,
            line=self._document.line(path),
        )

    def _id(self, entry: Mapping[str, Any], path: Path_, default: str) -> str:
        rule_id = entry.get("id", default)
        if not isinstance(rule_id, str) or not rule_id.strip():
            self._document.fail((*path, "id"), f"must be a non-empty string, got {rule_id!r}")
        rule_id = rule_id.strip().lower()
        if rule_id in self._ids:
            first = self._document.line(self._ids[rule_id])
            seen = f" (first on line {first})" if first else ""
            self._document.fail((*path, "id"), f"duplicate rule id {rule_id!r}{seen}")
        self._ids[rule_id] = path
        return rule_id

    def _priority(self, value: Any, path: Path_) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            self._document.fail((*path, "priority"), f"must be an integer, got {value!r}")
        return value

    def fallback(self, value: Any, path: Path_) -> Fallback | None:
        """Parses a fallback; None stays None."""
        if value is None:
            return None
        if isinstance(value, str) and value.strip().lower() in set(Fallback):
            return Fallback(value.strip().lower())
        hint = suggest_name(str(value), map(str, Fallback))
        raise self._document.error(
            path, f"must be one of {', '.join(Fallback)}, got {value!r}{hint}"
        )

    def _named_ids(self, value: Any, field: str, path: Path_) -> tuple[str, ...]:
        here = (*path, field)
        items = value if field == "prefer" and isinstance(value, list) else [value]
        if not items or not all(isinstance(item, str) and item for item in items):
            form = "an id or a list of ids" if field == "prefer" else "an id"
            self._document.fail(here, f"must be {form}, got {value!r}")
        if field == "restrict_to":
            ids = self._catalog.match_ids(items[0].strip())
            if not ids:
                self._unknown(items[0], here)
            return ids
        ids = tuple(item.strip().lower() for item in items)
        for item in ids:
            try:
                self._catalog.impl(item)
            except UnknownKernelError:
                self._unknown(item, here)
        if len(set(ids)) != len(ids):
            self._document.fail(here, f"names a kernel twice: {', '.join(ids)}")
        return ids

    def _unknown(self, name: str, path: Path_) -> None:
        known = self._catalog.match_ids("*")
        if not any(char in name for char in "*?["):
            self._document.fail(path, f"unknown kernel {name!r}{suggest_name(name, known)}")
        stems = sorted({stem for kernel_id in known for stem in _stems(kernel_id)})
        self._document.fail(path, f"pattern {name!r} matches no kernel{suggest_name(name, stems)}")

    def _scope(
        self, match: Predicate, op: str | None, ids: tuple[str, ...], path: Path_
    ) -> Predicate:
        """Limits a rule to the operations of the rows it names."""
        ops = sorted({self._catalog.impl(kernel_id).op for kernel_id in ids})
        if op is None:
            named = one_of("op", *ops)
            return named if isinstance(match, Const) else all_of(named, match)
        if op not in ops:
            self._document.fail(
                path, f"names kernels of operation {listing(ops)}, but the rule matches {op!r}"
            )
        return match

    def _params(self, value: Any, ids: tuple[str, ...], path: Path_) -> Mapping[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self._document.fail(path, f"must be a mapping, got {value!r}")
        rows = [self._catalog.impl(kernel_id) for kernel_id in ids]
        accepted = sorted({name for row in rows for name in row.accepts})
        for name in value:
            if name not in accepted:
                self._document.fail(
                    (*path, name),
                    f"unknown parameter {name!r}{suggest_name(name, accepted)} "
                    f"(accepted by the named kernels: {listing(accepted)})",
                )
        for row in rows:
            given = {name: item for name, item in value.items() if name in row.accepts}
            if row.check_params is None or not given:
                continue
            try:
                row.check_params(given)
            except (TypeError, ValueError) as error:
                self._document.fail(path, f"kernel {row.kernel_id!r}: {error}")
        return dict(value)

    def _refuse_conflicts(self, rules: list[Rule], key: str) -> None:
        """Refuses two rules of one priority when a call is known that both match."""
        for index, rule in enumerate(rules):
            for other in rules[:index]:
                if rule.priority != other.priority:
                    continue
                how = self._conflict(rule, other)
                if how:
                    line = f" (line {other.line})" if other.line else ""
                    self._document.fail(
                        (key, index),
                        f"{rule.id!r} and {other.id!r}{line} have the same priority "
                        f"{rule.priority} and {how}; give them different priorities or narrow "
                        "their match",
                    )

    def _conflict(self, rule: Rule, other: Rule) -> str:
        """Returns how two rules of one priority collide, or an empty string."""
        mine, theirs = _conjuncts(rule.match), _conjuncts(other.match)
        if mine <= theirs or theirs <= mine:
            return "one always matches where the other does"
        if rule.outcome(self._catalog) == other.outcome(self._catalog):
            return ""
        call = find_overlap(rule.match, other.match, self._catalog)
        if call is None:
            return ""
        shown = ", ".join(f"{path} {_shown(value)}" for path, value in call.items())
        return f"both match the call with {shown}"


def _stems(kernel_id: str) -> tuple[str, ...]:
    """Returns the patterns that people write for an id: ``torch.*`` and ``*.gemm.*``."""
    backend, *rest = kernel_id.split(".")
    return (f"{backend}.*", f"{backend}.{rest[0]}.*", f"*.{rest[0]}.*", f"*.{rest[0]}*")


def _shown(value: Any) -> str:
    if isinstance(value, frozenset):
        return str(sorted(value))
    return "null" if value is None else repr(value)


def _conjuncts(match: Predicate) -> frozenset[str]:
    if isinstance(match, Const):
        return frozenset()
    parts = match.parts if isinstance(match, And) else (match,)
    return frozenset(part.render() for part in parts)
