"""The matcher grammar of policies: plain data to predicates."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from phyai.dispatch.arch import Arch
from phyai.dispatch.catalog import Catalog, OpEntry
from phyai.dispatch.conditions import (
    at_least,
    compare,
    divisible,
    eq,
    has_any,
    is_none,
    ne,
    one_of,
)
from phyai.dispatch.device import VENDORS
from phyai.dispatch.facts import (
    GLOBAL_FACTS,
    NAMESPACES,
    OP_SCOPED_PREFIXES,
    FactKind,
    default_kind,
)
from phyai.dispatch.names import listing, suggest_name
from phyai.dispatch.policy_yaml import Document, Path_
from phyai.dispatch.predicate import ALWAYS, Predicate, all_of, any_of, implies, none_of

_COMPARISON = re.compile(r"(<=|>=|==|!=|<|>)\s*([+-]?\d+)")
_MODULUS = re.compile(r"%\s*(\d+)\s*(?:==\s*(\d+))?")
_OPERATOR = re.compile(r"\s*(<=|>=|==|!=|<|>|%)")
_GLOB_CHARS = frozenset("*?[")
_BOOL_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "0", "1"})
CLOSED_VALUES: Mapping[str, tuple[str, ...]] = {
    "device.vendor": VENDORS,
    "quant.granularity": ("per_tensor", "per_channel", "block"),
}
"""Facts whose values are known in advance, so that a misspelt one is an error."""
_COMBINATORS: Mapping[str, Callable[..., Predicate]] = {
    "all_of": all_of,
    "any_of": any_of,
    "none_of": none_of,
}


def predicate_from_literal(path: str, literal: Any, kind: FactKind) -> Predicate:
    """Compiles one matcher entry.

    Args:
        path: fact path.
        literal: None (known absent), a scalar (equality, or a comparison written as a string), or
            a list (membership).
        kind: kind of the fact, which decides the forms it has.

    Raises:
        ValueError: for a form the kind does not have.
    """
    if literal is None:
        return is_none(path)
    if isinstance(literal, list):
        return _membership(path, literal, kind)
    if isinstance(literal, Mapping):
        raise ValueError(f"{path!r} takes a value, not a mapping")
    if kind is FactKind.STRSET:
        return has_any(path, _text(path, literal))
    if kind is FactKind.INT and isinstance(literal, str):
        return _integer_text(path, literal)
    if kind is FactKind.ARCH and isinstance(literal, str) and _OPERATOR.match(literal):
        if not literal.strip().startswith(">="):
            raise ValueError(f"{path!r} compares only with '>='; got {literal!r}")
        return at_least(literal.strip()[2:].strip())
    return eq(path, _scalar(path, literal, kind), kind)


def _membership(path: str, literal: list[Any], kind: FactKind) -> Predicate:
    if not literal:
        raise ValueError(f"{path!r} has an empty list; it would never match")
    if kind is FactKind.STRSET:
        return has_any(path, *(_text(path, item) for item in literal))
    values = [None if item is None else _scalar(path, item, kind) for item in literal]
    return one_of(path, *values, kind=kind)


def _integer_text(path: str, text: str) -> Predicate:
    stripped = text.strip()
    if match := _COMPARISON.fullmatch(stripped):
        op, value = match[1], int(match[2])
        if op == "==":
            return eq(path, value)
        return ne(path, value) if op == "!=" else compare(path, op, value)
    if match := _MODULUS.fullmatch(stripped):
        return divisible(path, int(match[1]), int(match[2] or 0))
    raise ValueError(
        f'{path!r} is an integer; got {text!r}. Allowed: 64, "<=64", "%16", "%16==1", '
        "a list, or null"
    )


def _text(path: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{path!r} takes strings; got {value!r}, quote it")
    if _GLOB_CHARS & set(value):
        raise ValueError(f"{path!r} takes no patterns; list the values instead of {value!r}")
    allowed = CLOSED_VALUES.get(path)
    if allowed is not None and value.strip().lower() not in allowed:
        hint = suggest_name(value, allowed)
        raise ValueError(f"{path!r} is never {value!r}{hint} (allowed: {', '.join(allowed)})")
    return value


def _scalar(path: str, value: Any, kind: FactKind) -> Any:
    if isinstance(value, list | Mapping):
        raise ValueError(f"{path!r} takes plain values; got {value!r}")
    if kind is FactKind.INT:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{path!r} is an integer; got {value!r}")
        return value
    if kind is FactKind.BOOL:
        if isinstance(value, bool):
            return value
        if str(value).strip().lower() not in _BOOL_WORDS:
            raise ValueError(f"{path!r} is true or false; got {value!r}")
        return str(value)
    if kind is FactKind.ANY:
        return _text(path, value) if isinstance(value, str) else value
    text = _text(path, value)
    return Arch.parse(text).name if kind is FactKind.ARCH else text


class MatcherCompiler:
    """Compiles ``match`` mappings of one document.

    Args:
        document: where errors are located.
        catalog: operations whose facts are checked.
    """

    def __init__(self, document: Document, catalog: Catalog) -> None:
        self._document = document
        self._catalog = catalog

    def compile(
        self, match: Any, path: Path_, entry: OpEntry | None = None
    ) -> tuple[Predicate, OpEntry | None]:
        """Returns the predicate and the operation that ``match.op`` names, if it names one.

        Raises:
            PolicyError: naming file, line and the offending entry.
        """
        if not isinstance(match, Mapping):
            self._document.fail(path, f"must be a mapping of facts, got {match!r}")
        if isinstance(match.get("op"), str):
            name = match["op"].strip().lower()
            if name not in self._catalog.ops():
                known = self._catalog.ops()
                self._document.fail(
                    (*path, "op"),
                    f"unknown operation {match['op']!r}{suggest_name(name, known)} "
                    f"(known: {listing(known)})",
                )
            entry = self._catalog.entry(name)
        parts = [self._entry(key, value, "", (*path, key), entry) for key, value in match.items()]
        return (all_of(*parts) if parts else ALWAYS), entry

    def _entry(
        self, key: str, value: Any, prefix: str, path: Path_, entry: OpEntry | None
    ) -> Predicate:
        if key in _COMBINATORS or key == "when":
            if prefix:
                self._document.fail(path, f"{key!r} is not allowed inside a namespace")
            if key == "when":
                return self._implication(value, path, entry)
            return self._combination(key, value, path, entry)
        fact = prefix + key
        if isinstance(value, Mapping):
            if fact in NAMESPACES or fact == "quant.fields":
                if not value:
                    self._document.fail(path, "is an empty mapping")
                parts = [
                    self._entry(name, item, f"{fact}.", (*path, name), entry)
                    for name, item in value.items()
                ]
                return all_of(*parts)
            self._document.fail(path, f"{fact!r} is no namespace and takes no mapping")
        kind = self._kind(fact, path, entry)
        if fact == "op" and isinstance(value, list):
            for name in value:
                if name not in self._catalog.ops():
                    hint = suggest_name(str(name), self._catalog.ops())
                    known = listing(self._catalog.ops())
                    self._document.fail(path, f"unknown operation {name!r}{hint} (known: {known})")
        try:
            return predicate_from_literal(fact, value, kind)
        except (TypeError, ValueError) as error:
            self._document.fail(path, str(error))

    def _kind(self, fact: str, path: Path_, entry: OpEntry | None) -> FactKind:
        if entry is not None and fact.startswith(OP_SCOPED_PREFIXES):
            if fact in entry.kinds:
                return entry.kinds[fact]
            hint = suggest_name(fact, entry.kinds)
            same = next((known for known in entry.kinds if known.lower() == fact.lower()), None)
            if same is not None:
                hint = f"; names are case-sensitive, write {same!r}"
            self._document.fail(
                path,
                f"operation {entry.spec.name!r} has no fact {fact!r}{hint} "
                f"(known: {listing(entry.kinds)})",
            )
        if fact.startswith(OP_SCOPED_PREFIXES):
            return self._shared_kind(fact, path)
        kind = default_kind(fact)
        if kind is None:
            known = [*GLOBAL_FACTS, *self._scoped()]
            self._document.fail(
                path,
                f"unknown fact {fact!r}{suggest_name(fact, known)} "
                f"(known: {listing(GLOBAL_FACTS)}, lib.<name>, quant.fields.<name>, "
                "and shape.*, dtype.* and attrs.* of the operation)",
            )
        return kind

    def _shared_kind(self, fact: str, path: Path_) -> FactKind:
        """Returns the kind of a path that the rule ties to no single operation."""
        scoped = self._scoped()
        if fact not in scoped:
            self._document.fail(
                path, f"no operation has a fact {fact!r}{suggest_name(fact, scoped)}"
            )
        kinds = scoped[fact]
        return next(iter(kinds)) if len(kinds) == 1 else FactKind.ANY

    def _scoped(self) -> dict[str, set[FactKind]]:
        paths: dict[str, set[FactKind]] = {}
        for op in self._catalog.ops():
            for fact, kind in self._catalog.entry(op).kinds.items():
                paths.setdefault(fact, set()).add(kind)
        return paths

    def _combination(self, key: str, value: Any, path: Path_, entry: OpEntry | None) -> Predicate:
        if not isinstance(value, list) or not value:
            self._document.fail(path, f"{key!r} takes a non-empty list of matchers")
        parts = [self.compile(item, (*path, i), entry)[0] for i, item in enumerate(value)]
        return _COMBINATORS[key](*parts)

    def _implication(self, value: Any, path: Path_, entry: OpEntry | None) -> Predicate:
        if not isinstance(value, Mapping) or set(value) != {"if", "then"}:
            self._document.fail(path, "'when' takes a mapping with exactly 'if' and 'then'")
        condition, _ = self.compile(value["if"], (*path, "if"), entry)
        then, _ = self.compile(value["then"], (*path, "then"), entry)
        return implies(condition, then)
