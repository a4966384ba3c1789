"""What importers share: the config files of a checkpoint and typed access to them."""

import reprlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from phyai_quant.rules import Matcher, MatcherKind, Rule
from phyai_quant.scheme import QuantConfigError

_REPR = reprlib.Repr(maxlevel=4, maxlist=8, maxdict=8, maxstring=200, maxother=200)


def shown(value: object) -> str:
    """Returns the value as text, cut where it is long or deep."""
    return _REPR.repr(value)


@dataclass(frozen=True, slots=True)
class Section:
    """A JSON object and where it stands; reads of wrong types are errors with file and key.

    A key that is null reads like an absent one.
    """

    data: Mapping[str, Any]
    file: str
    path: str = ""

    def where(self, key: str = "") -> str:
        """Returns ``file: dotted.path`` of a key."""
        path = ".".join(part for part in (self.path, key) if part)
        return f"{self.file}: {path}" if path else self.file

    def fail(self, message: str, key: str = "") -> NoReturn:
        """Raises QuantConfigError with the place of a key."""
        raise QuantConfigError(f"{self.where(key)}: {message}")

    def has(self, key: str) -> bool:
        """Tells whether the key is present and not null."""
        return self.data.get(key) is not None

    def string(self, key: str, allowed: Iterable[str] | None = None) -> str | None:
        """Returns a string, optionally one of ``allowed``, or None."""
        value = self.data.get(key)
        if value is None:
            return None
        choices = None if allowed is None else tuple(allowed)
        if not isinstance(value, str) or (choices is not None and value not in choices):
            expected = "a string" if choices is None else ", ".join(choices)
            self.fail(f"{shown(value)} is not allowed; allowed: {expected}", key)
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """Returns a boolean or the default."""
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(f"{shown(value)} is not allowed; allowed: true, false", key)
        return value

    def integer(self, key: str) -> int | None:
        """Returns an integer or None."""
        value = self.data.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(f"{shown(value)} is not an integer", key)
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """Returns a list of non-empty strings; empty when absent or null."""
        value = self.data.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or any(not isinstance(v, str) or not v for v in value):
            self.fail(f"{shown(value)} is not a list of non-empty strings", key)
        return tuple(value)

    def block_shape(self, key: str) -> tuple[int, int] | None:
        """Returns two positive sizes, written as a list or as ``"128x128"``, or None."""
        value = self.data.get(key)
        if value is None:
            return None
        parts = value
        if isinstance(value, str):
            texts = value.lower().split("x")
            parts = [int(text) if text.isdecimal() else 0 for text in texts]
        pair = isinstance(parts, list | tuple) and len(parts) == 2
        if not pair or any(type(part) is not int or part < 1 for part in parts):
            self.fail(f"{shown(value)} is not two positive sizes [N block, K block]", key)
        return (parts[0], parts[1])

    def section(self, key: str) -> "Section":
        """Returns a nested object; an absent or null one is empty."""
        value = self.data.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            self.fail(f"expected an object, got {shown(value)}", key)
        return Section(value, self.file, ".".join(part for part in (self.path, key) if part))

    def sections(self) -> list[tuple[str, "Section"]]:
        """Returns every key with its nested object."""
        return [(key, self.section(key)) for key in self.data]

    def reject(self, key: str, reason: str) -> None:
        """Fails when a key that would change the numbers holds anything."""
        if self.data.get(key):
            self.fail(f"{shown(self.data[key])} is not supported: {reason}", key)

    def require_known(self, known: Sequence[str]) -> None:
        """Fails on a key outside ``known``."""
        for key in self.data:
            if key not in known:
                self.fail(f"unknown key; known: {', '.join(known)}", str(key))

    def warn_unknown(self, known: Sequence[str]) -> None:
        """Warns about keys outside ``known``, which are ignored."""
        unknown = [str(key) for key in self.data if key not in known]
        if unknown:
            warnings.warn(
                f"{self.where()}: ignoring unknown keys {', '.join(unknown)}", stacklevel=3
            )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file header says of one tensor: ``dtype`` as in safetensors (``I8``), and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerMarker:
    """The description that a weight file carries for one layer.

    Attributes:
        module: Name of the layer.
        section: The description and where it stands.
        tensors: The layer's tensors by their last name component, such as ``weight_scale``.
    """

    module: str
    section: Section
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConfigSources:
    """The quantization configs of one checkpoint directory.

    Attributes:
        inline: ``quantization_config`` (or its older name) of ``config.json``.
        standalone: The whole of ``hf_quant_config.json``.
        markers: Descriptions of single layers inside the weight files.
    """

    inline: Section | None = None
    standalone: Section | None = None
    markers: tuple[LayerMarker, ...] = ()

    @property
    def method(self) -> str | None:
        """The lower-cased method that the inline config names, or else its producer."""
        if self.inline is None:
            return None
        method = self.inline.string("quant_method") or self.inline.string("quant_library")
        if method is None and isinstance(self.inline.data.get("producer"), Mapping):
            method = self.inline.section("producer").string("name")
        return None if method is None else method.lower()

    def places(self) -> tuple[str, ...]:
        """Returns where each of the configs stands, for messages."""
        sections = [self.inline, self.standalone, *(marker.section for marker in self.markers[:1])]
        return tuple(section.where() for section in sections if section is not None)


class QuantImporter(Protocol):
    """Recognises one config format and turns it into a plan."""

    @property
    def name(self) -> str:
        """Name of the format, for messages."""
        ...

    def detect(self, sources: ConfigSources) -> bool:
        """Tells whether the configs are in this format; looks at names only."""
        ...

    def build_plan(self, sources: ConfigSources) -> Any:
        """Returns the `QuantPlan`; QuantConfigError names file and key of what it cannot honour."""
        ...


def make_rule(section: Section, key: str, kind: MatcherKind, pattern: str, scheme: Any) -> Rule:
    """Returns a rule whose source is the config entry; a bad pattern fails with its place."""
    try:
        matcher = Matcher(kind, pattern)
    except QuantConfigError as error:
        section.fail(str(error), key)
    return Rule(matcher, scheme, source=f"{section.where(key)}: {pattern}")


WILDCARDS = frozenset("*?[")
"""Characters that make an entry a shell pattern."""


def entry_rule(section: Section, key: str, entry: str, scheme: Any) -> Rule:
    """Returns the rule of an entry: ``re:`` expression, shell pattern or name."""
    if entry.startswith("re:"):
        return make_rule(section, key, MatcherKind.REGEX, entry.removeprefix("re:"), scheme)
    kind = MatcherKind.GLOB if WILDCARDS & set(entry) else MatcherKind.NAME
    return make_rule(section, key, kind, entry, scheme)


def excluded_rules(section: Section, keys: Iterable[str]) -> list[Rule]:
    """Returns rules that keep listed modules unquantized, each name with everything below it.

    Args:
        section: The config.
        keys: Spellings of the list's key; the lists are joined.
    """
    rules: list[Rule] = []
    entries: set[str] = set()
    for key in keys:
        for entry in section.strings(key):
            if entry not in entries:
                entries.add(entry)
                rules += _excluded(section, key, entry)
    return rules


def _excluded(section: Section, key: str, name: str) -> list[Rule]:
    if name.startswith("re:") or WILDCARDS & set(name):
        return [entry_rule(section, key, name, None)]
    exact = make_rule(section, key, MatcherKind.NAME, name, None)
    below = Rule(Matcher(MatcherKind.GLOB, f"{name}.*"), None, source=exact.source)
    return [exact, below]
