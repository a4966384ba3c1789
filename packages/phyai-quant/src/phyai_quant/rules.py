"""Rules of a plan: a test on a layer's name or class, and the scheme that it gives."""

from dataclasses import dataclass, field
from enum import StrEnum

from phyai_quant import matching
from phyai_quant.scheme import QuantConfigError, QuantScheme


class MatcherKind(StrEnum):
    """How a matcher's pattern is read."""

    NAME = "name"
    GLOB = "glob"
    REGEX = "regex"
    MODULE_CLS = "module_cls"


@dataclass(frozen=True, slots=True)
class Matcher:
    """A test on a layer's dotted name or class.

    Attributes:
        kind: ``name`` (equal, or equal to the last component), ``glob`` (shell pattern over the
            whole name, ``*`` crosses dots), ``regex`` (anchored at the start only) or
            ``module_cls`` (part of the class name).
        pattern: The text to compare with.

    Raises:
        QuantConfigError: Unknown kind, empty pattern, a name with an empty segment, or an
            expression that does not compile.
    """

    kind: MatcherKind
    pattern: str

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "kind", MatcherKind(self.kind))
        except ValueError as error:
            raise QuantConfigError(
                f"unknown matcher kind {self.kind!r}; allowed: {', '.join(MatcherKind)}"
            ) from error
        if not isinstance(self.pattern, str) or not self.pattern:
            raise QuantConfigError(
                f"matcher {self.kind.value} needs a non-empty string, not {self.pattern!r}"
            )
        if self.kind is MatcherKind.NAME:
            matching.check_name(self.pattern)
        if self.kind is MatcherKind.REGEX:
            matching.compile_regex(self.pattern)

    def matches(self, prefix: str, module_cls: type | str | None = None) -> bool:
        """Tells whether the layer ``prefix`` of class ``module_cls`` passes the test."""
        match self.kind:
            case MatcherKind.NAME:
                return matching.name_matches(self.pattern, prefix)
            case MatcherKind.GLOB:
                return matching.glob_matches(self.pattern, prefix)
            case MatcherKind.REGEX:
                return matching.regex_matches(self.pattern, prefix)
            case MatcherKind.MODULE_CLS:
                return matching.class_matches(self.pattern, module_cls)


@dataclass(frozen=True, slots=True)
class Rule:
    """A matcher and what it gives.

    Attributes:
        matcher: Which layers.
        scheme: Their scheme; None keeps them unquantized on purpose.
        source: Where the rule was written, for messages. Rules with the same source stand for one
            entry of a config.
    """

    matcher: Matcher
    scheme: QuantScheme | None
    source: str = field(default="", compare=False)

    def describe(self) -> str:
        """Returns a short text naming the matcher, the scheme and the source."""
        scheme = "unquantized" if self.scheme is None else self.scheme.describe()
        where = f" ({self.source})" if self.source else ""
        return f"{self.matcher.kind.value} {self.matcher.pattern!r} -> {scheme}{where}"
