"""Which layer gets which scheme: an ordered list of rules, first match wins."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phyai_quant import matching
from phyai_quant.rules import Matcher, MatcherKind, Rule
from phyai_quant.scheme import QuantConfigError, QuantScheme, TensorQuant


@dataclass(frozen=True, slots=True)
class LegResolution:
    """The decision for one checkpoint layer.

    Attributes:
        name: Name of the leg.
        matched_name: The spelling (leg or fused name) that the rule matched; None for the default.
        rule: The rule that decided; None when the plan's default did.
        scheme: The resulting scheme.
    """

    name: str
    matched_name: str | None
    rule: Rule | None
    scheme: QuantScheme | None

    def describe(self) -> str:
        """Returns one line naming the leg, its scheme and the rule."""
        scheme = "unquantized" if self.scheme is None else self.scheme.describe()
        reason = "no rule matched, default" if self.rule is None else self.rule.describe()
        return f"{self.name}: {scheme} [{reason}]"


@dataclass(frozen=True, slots=True)
class Resolution:
    """The decision for one layer, leg by leg."""

    prefix: str
    legs: tuple[LegResolution, ...]

    @property
    def agrees(self) -> bool:
        """True when every leg has the same scheme."""
        return all(leg.scheme == self.legs[0].scheme for leg in self.legs)

    @property
    def scheme(self) -> QuantScheme | None:
        """The scheme of all legs; QuantConfigError when they differ."""
        if not self.agrees:
            lines = "\n  ".join(leg.describe() for leg in self.legs)
            raise QuantConfigError(
                f"the legs of fused layer {self.prefix!r} have different schemes; give all of them "
                f"the same one:\n  {lines}"
            )
        return self.legs[0].scheme

    def decided_by(self, source: str = "") -> str:
        """Returns the rule of the first leg, or the plan's default, for messages.

        Args:
            source: Where the plan was read from.
        """
        rule = self.legs[0].rule
        if rule is not None:
            return rule.describe()
        return f"the default of {source}" if source else "the default"

    def __str__(self) -> str:
        head = self.prefix if self.agrees else f"{self.prefix}: legs disagree"
        return "\n  ".join([head, *(leg.describe() for leg in self.legs)])


@dataclass(frozen=True, slots=True)
class QuantPlan:
    """Ordered rules and the scheme of every layer that none of them matches.

    Attributes:
        rules: Tested in order; the first match decides.
        default: Scheme of unmatched layers; None leaves them unquantized.
        kv_cache: Quantization of cached keys and values that the checkpoint declares. It is data:
            resolving layers does not use it.
        source: The file or section the plan was read from, for messages.
    """

    rules: tuple[Rule, ...] = ()
    default: QuantScheme | None = None
    kv_cache: TensorQuant | None = None
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))

    def resolve(
        self,
        prefix: str,
        module_cls: type | str | None = None,
        *,
        legs: Sequence[str] | None = None,
        stored: Sequence[str] = (),
    ) -> QuantScheme | None:
        """Returns the scheme of a layer.

        A fused layer (``qkv_proj``, ``gate_up_proj``) is the layers it was fused from: a rule that
        names the fused layer holds for all legs, a rule that names a leg for that leg, and all legs
        must end up with the same scheme.

        Args:
            prefix: Full dotted name of the layer.
            module_cls: Its class or class name, for ``module_cls`` rules.
            legs: Last components of the legs of a fused layer that is not a known one.
            stored: Full names of the legs in the checkpoint where the model spells them
                otherwise; rules match either.

        Raises:
            QuantConfigError: The legs disagree, or a name has an empty segment.
        """
        return self.explain(prefix, module_cls, legs=legs, stored=stored).scheme

    def explain(
        self,
        prefix: str,
        module_cls: type | str | None = None,
        *,
        legs: Sequence[str] | None = None,
        stored: Sequence[str] = (),
    ) -> Resolution:
        """Returns which rule decides each leg of the layer; arguments as `resolve`."""
        matching.check_name(prefix)
        names = matching.fused_legs(prefix, legs)
        others = [(matching.check_name(name),) for name in stored] or [()] * len(names)
        return Resolution(
            prefix,
            tuple(
                self._resolve_leg(leg, (*matching.names_of_leg(leg, prefix), *other), module_cls)
                for leg, other in zip(names, others, strict=True)
            ),
        )

    def _resolve_leg(
        self, leg: str, names: tuple[str, ...], module_cls: type | str | None
    ) -> LegResolution:
        for rule in self.rules:
            for name in names:
                if rule.matcher.matches(name, module_cls):
                    return LegResolution(leg, name, rule, rule.scheme)
        return LegResolution(leg, None, None, self.default)

    def unmatched(self, names: Iterable[str] | Mapping[str, type | str | None]) -> tuple[Rule, ...]:
        """Returns the rules that match no layer of a model, in order.

        Args:
            names: The names of its layers, or a mapping from name to class. Without classes
                ``module_cls`` rules cannot be judged and are left out.
        """
        layers = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names)
        judged = [
            rule
            for rule in self.rules
            if isinstance(names, Mapping) or rule.matcher.kind is not MatcherKind.MODULE_CLS
        ]
        used = {id(rule) for rule in judged if _matches_any(rule.matcher, layers)}
        sources = {rule.source for rule in judged if id(rule) in used and rule.source}
        return tuple(r for r in judged if id(r) not in used and r.source not in sources)

    def with_rules(self, rules: Iterable[Rule]) -> "QuantPlan":
        """Returns this plan with ``rules`` in front, so that they override it."""
        return replace(self, rules=(*rules, *self.rules))

    def merged_with(self, other: "QuantPlan") -> "QuantPlan":
        """Returns the plan of a policy (self) over that of a checkpoint (``other``).

        Rules of self are tested first, then those of other, then the default that one of them has:
        a default never takes a layer away from a rule. The cache quantization of self goes before
        that of other.

        Raises:
            QuantConfigError: Both have a default and the two differ.
        """
        if self.default is not None and other.default not in (None, self.default):
            raise QuantConfigError(
                f"{self.source or 'the first plan'} has the default {self.default.describe()} and "
                f"{other.source or 'the second plan'} has the default {other.default.describe()}; "
                "a merged plan has one: replace the first by rules that name layers"
            )
        return QuantPlan(
            rules=(*self.rules, *other.rules),
            default=self.default if other.default is None else other.default,
            kv_cache=other.kv_cache if self.kv_cache is None else self.kv_cache,
            source=" over ".join(text for text in (self.source, other.source) if text),
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping of rules, default and kv_cache, for fingerprints."""
        return {
            "rules": [
                {
                    "match": {rule.matcher.kind.value: rule.matcher.pattern},
                    "scheme": None if rule.scheme is None else rule.scheme.as_dict(),
                }
                for rule in self.rules
            ],
            "default": None if self.default is None else self.default.as_dict(),
            "kv_cache": None if self.kv_cache is None else self.kv_cache.as_dict(),
        }


def warn_unmatched(
    plan: QuantPlan, names: Iterable[str] | Mapping[str, type | str | None]
) -> tuple[Rule, ...]:
    """Warns about every config entry that matches no layer, naming file, key and entry.

    Args:
        plan: The plan in force.
        names: Names of the model's layers, or a mapping from name to class, as in
            `QuantPlan.unmatched`.

    Returns:
        The rules that match nothing.
    """
    unused = plan.unmatched(names)
    for text in dict.fromkeys(rule.source or rule.describe() for rule in unused):
        warnings.warn(
            f"quantization entry matches no layer of this model: {text}; compare its spelling "
            "with the layer names",
            stacklevel=2,
        )
    return unused


def _matches_any(matcher: Matcher, layers: Mapping[str, type | str | None]) -> bool:
    return any(
        matcher.matches(name, module_cls)
        for prefix, module_cls in layers.items()
        for leg in matching.fused_legs(prefix)
        for name in matching.names_of_leg(leg, prefix)
    )
