"""What two policies decide differently, whatever their spelling.

Rules are compared by what they decide: their condition in a normal form, the rows they name in
order, params, priority and fallback. Order of kernel rules, nesting of facts, spelled-out defaults
and ``restrict_to: id`` for ``prefer: [id]`` make no difference; the order of quantization rules
does, because the first match decides there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.leaves import OneOf
from phyai.dispatch.policy import Policy, Rule
from phyai.dispatch.policy_canonical import tensor_fields
from phyai.dispatch.predicate import And, Not, Or, Predicate

if TYPE_CHECKING:
    from phyai_quant import QuantScheme
    from phyai_quant.plan import QuantPlan


@dataclass(frozen=True, slots=True)
class Change:
    """One difference.

    Attributes:
        where: what differs, such as ``rules 'expert' priority``.
        old: what the first policy says; None where it says nothing.
        new: what the second policy says; None where it says nothing.
    """

    where: str
    old: str | None
    new: str | None

    def as_dict(self) -> dict[str, str | None]:
        """Returns the JSON-able fields."""
        return {"where": self.where, "old": self.old, "new": self.new}


def diff_policies(old: Policy, new: Policy, catalog: Catalog) -> list[Change]:
    """Returns the differences in what two policies decide; none for equal decisions.

    Args:
        old: first policy.
        new: second policy.
        catalog: catalog that both were loaded with; it says which rows a pattern names.
    """
    changes = _fields(
        "",
        {"profile": str(old.profile), "fallback": str(old.fallback)},
        {"profile": str(new.profile), "fallback": str(new.fallback)},
    )
    for key in ("rules", "overrides"):
        changes += _rules(key, getattr(old, key), getattr(new, key), catalog)
    return changes + _plans(old.quant_plan, new.quant_plan)


def _fields(prefix: str, old: Mapping[str, str], new: Mapping[str, str]) -> list[Change]:
    return [
        Change(prefix + name, old.get(name), new.get(name))
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def _rules(key: str, old: Sequence[Rule], new: Sequence[Rule], catalog: Catalog) -> list[Change]:
    """Pairs rules by id, then those left over by content, and compares the pairs."""
    before = {rule.id: _decided(rule, catalog) for rule in old}
    after = {rule.id: _decided(rule, catalog) for rule in new}
    changes: list[Change] = []
    for rule_id in [name for name in before if name in after]:
        changes += _fields(f"{key} {rule_id!r} ", before.pop(rule_id), after.pop(rule_id))
    for rule_id, content in before.items():
        same = next((name for name, other in after.items() if other == content), None)
        if same is None:
            changes.append(Change(f"{key} {rule_id!r}", _line(content), None))
        else:
            del after[same]
    changes += [Change(f"{key} {name!r}", None, _line(content)) for name, content in after.items()]
    return changes


def _decided(rule: Rule, catalog: Catalog) -> dict[str, str]:
    content = {
        "priority": str(rule.priority),
        "match": normal_form(rule.match),
        "rows": ", ".join(rule.candidates(catalog)),
    }
    if rule.params:
        content["params"] = ", ".join(
            f"{name}: {rule.params[name]!r}" for name in sorted(rule.params)
        )
    if rule.fallback is not None:
        content["fallback"] = str(rule.fallback)
    return content


def _line(content: Mapping[str, str]) -> str:
    return "; ".join(f"{name} {value}" for name, value in content.items())


def normal_form(predicate: Predicate) -> str:
    """Returns text that is equal for conditions that differ only in spelling.

    Parts are sorted, flattened and listed once, double negation is dropped, and a list of one
    value is that value.
    """
    if isinstance(predicate, Not):
        inner = predicate.part
        return normal_form(inner.part) if isinstance(inner, Not) else f"not ({normal_form(inner)})"
    if isinstance(predicate, And | Or):
        kind = type(predicate)
        word = " and " if kind is And else " or "
        parts = sorted({_part(part, kind) for part in _flattened(predicate, kind)})
        return word.join(parts) or predicate.render()
    if isinstance(predicate, OneOf) and len(set(predicate.values)) == 1:
        (value,) = set(predicate.values)
        shown = repr(value) if isinstance(value, str) else str(value)
        return f"{predicate.path} is none" if value is None else f"{predicate.path} == {shown}"
    return predicate.render()


def _flattened(predicate: Predicate, kind: type[Predicate]) -> list[Predicate]:
    if not isinstance(predicate, And | Or) or type(predicate) is not kind:
        return [predicate]
    return [leaf for part in predicate.parts for leaf in _flattened(part, kind)]


def _part(predicate: Predicate, kind: type[Predicate]) -> str:
    text = normal_form(predicate)
    other = Or if kind is And else And
    return f"({text})" if isinstance(predicate, other) and len(predicate.parts) > 1 else text


def _plans(old: "QuantPlan | None", new: "QuantPlan | None") -> list[Change]:
    """Compares quantization rules in order; moved rules are a removal and an addition."""
    before, after = _plan_lines(old), _plan_lines(new)
    changes: list[Change] = []
    for tag, first, last, start, end in SequenceMatcher(None, before, after).get_opcodes():
        if tag != "equal":
            pairs = max(last - first, end - start)
            left = before[first:last] + [None] * (pairs - (last - first))
            right = after[start:end] + [None] * (pairs - (end - start))
            changes += [Change("quantization", a, b) for a, b in zip(left, right, strict=True)]
    return changes


def _plan_lines(plan: "QuantPlan | None") -> list[str]:
    if plan is None:
        return []
    lines = [
        f"{rule.matcher.kind.value} {rule.matcher.pattern}: {_scheme(rule.scheme)}"
        for rule in plan.rules
    ]
    return [*lines, f"default: {_scheme(plan.default)}"]


def _scheme(scheme: "QuantScheme | None") -> str:
    if scheme is None:
        return "unquantized"
    tensors = {"weight": scheme.weight, "input": scheme.input}
    return ", ".join(
        f"{role} {_tensor(tensor_fields(tensor))}"
        for role, tensor in tensors.items()
        if tensor is not None
    )


def _tensor(fields: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}"
