"""A kernel policy: which rows a deployment wants where, and which weights it quantizes."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.errors import PolicyError
from phyai.dispatch.facts import Facts
from phyai.dispatch.opspec import Impl
from phyai.dispatch.predicate import ALWAYS, Predicate
from phyai.dispatch.types import Fallback, Profile, freeze

if TYPE_CHECKING:
    from phyai_quant.plan import QuantPlan


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One entry of ``rules`` or ``overrides``.

    Attributes:
        id: name, unique in its policy.
        priority: higher wins; two matching rules of one priority that decide differently are an
            error.
        match: when the rule applies.
        prefer: ids in order of preference.
        restrict_to: an id or a glob over ids.
        use: the only id, for overrides.
        params: policy params for the rows the rule names.
        fallback: overrides the policy's fallback when this rule applies.
        strict: whether it is an override: its rows or an error.
        line: line in the policy file.
    """

    id: str
    priority: int = 0
    match: Predicate = ALWAYS
    prefer: tuple[str, ...] = ()
    restrict_to: str | None = None
    use: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    fallback: Fallback | None = None
    strict: bool = False
    line: int | None = None

    def candidates(self, catalog: Catalog) -> tuple[str, ...]:
        """Returns the ids the rule names; a glob keeps the catalog's priority order."""
        if self.use is not None:
            return (self.use,)
        if self.restrict_to is not None:
            return catalog.match_ids(self.restrict_to)
        return self.prefer

    def params_for(self, impl: Impl) -> dict[str, Any]:
        """Returns the params that a named row accepts."""
        return {name: value for name, value in self.params.items() if name in impl.accepts}

    def outcome(self, catalog: Catalog) -> tuple[Any, ...]:
        """Returns what the rule decides: rows in order, their params, fallback, strictness."""
        return (self.candidates(catalog), freeze(self.params), self.fallback, self.strict)

    def fingerprint(self) -> dict[str, Any]:
        """Returns the JSON-able content that decides choices."""
        return {
            "id": self.id,
            "priority": self.priority,
            "match": self.match.render(),
            "prefer": list(self.prefer),
            "restrict_to": self.restrict_to,
            "use": self.use,
            "params": repr(freeze(self.params)),
            "fallback": self.fallback,
        }


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy says about one call.

    Attributes:
        rule: the rule that applies, or None.
        candidates: ids it names, in order.
        fallback: what may stand in when none of them is usable.
        agreeing: further rules of the same priority that decide the same.
    """

    rule: Rule | None
    candidates: tuple[str, ...]
    fallback: Fallback
    agreeing: tuple[Rule, ...] = ()

    @property
    def strict(self) -> bool:
        """Whether only the named rows may run."""
        return self.rule is not None and self.rule.strict

    @property
    def matched_rules(self) -> tuple[str, ...]:
        """Ids of the rules that decided."""
        if self.rule is None:
            return ()
        return tuple(rule.id for rule in (self.rule, *self.agreeing))


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A parsed policy. Make one with `load_policy` or `policy_from_mapping`.

    Attributes:
        profile: rank by priority (static) or by measurement (autotune).
        fallback: whether reference rows may stand in. With ``error`` and no matching rule, the
            reference rows of an operation that has other rows are excluded.
        rules: soft rules: an allow-list in order of preference.
        overrides: strict rules, considered before ``rules``.
        quant_plan: the quantization section, or None.
        source: file the policy came from; not part of `version`.
    """

    profile: Profile = Profile.STATIC
    fallback: Fallback = Fallback.REFERENCE
    rules: tuple[Rule, ...] = ()
    overrides: tuple[Rule, ...] = ()
    quant_plan: "QuantPlan | None" = None
    source: str = ""

    def decide(self, facts: Facts, catalog: Catalog) -> Decision:
        """Returns the decision of the matching override or rule of highest priority.

        Raises:
            PolicyError: if two of them match with the same priority and decide differently.
        """
        for what, group in (("overrides", self.overrides), ("rules", self.rules)):
            matched = [rule for rule in group if rule.match.eval(facts).ok]
            if not matched:
                continue
            top = max(rule.priority for rule in matched)
            winners = [rule for rule in matched if rule.priority == top]
            rule, *agreeing = winners
            if any(rule.outcome(catalog) != other.outcome(catalog) for other in agreeing):
                raise self._conflict(what, winners, facts)
            fallback = rule.fallback or self.fallback
            return Decision(rule, rule.candidates(catalog), fallback, tuple(agreeing))
        return Decision(None, (), self.fallback)

    def _conflict(self, what: str, rules: list[Rule], facts: Facts) -> PolicyError:
        named = ", ".join(
            f"{rule.id!r}" + (f" (line {rule.line})" if rule.line else "") for rule in rules
        )
        role = facts.get("role")
        return PolicyError(
            f"conflicting {what} {named} match operation {facts.get('op')!r} role {role!r} with "
            f"the same priority {rules[0].priority}; give them different priorities or narrow "
            "their match",
            source=self.source,
            line=rules[0].line,
        )

    def paths(self) -> frozenset[str]:
        """Returns every fact path its rules read."""
        rules = (*self.overrides, *self.rules)
        return frozenset().union(*(rule.match.facts_used() for rule in rules))

    @cached_property
    def version(self) -> str:
        """First 16 hex digits of the SHA-256 of everything that decides a choice."""
        payload: dict[str, Any] = {
            "profile": self.profile,
            "fallback": self.fallback,
            "rules": [rule.fingerprint() for rule in self.rules],
            "overrides": [rule.fingerprint() for rule in self.overrides],
        }
        if self.quant_plan is not None:
            plan = self.quant_plan
            rules = [(repr(rule.matcher), repr(rule.scheme)) for rule in plan.rules]
            payload["quantization"] = [rules, repr(plan.default)]
        text = json.dumps(payload, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
