"""Loading a policy from a file or a mapping."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.dispatch.catalog import Catalog, build_catalog
from phyai.dispatch.errors import PolicyError
from phyai.dispatch.names import suggest_name
from phyai.dispatch.policy import Policy
from phyai.dispatch.policy_rules import RuleParser
from phyai.dispatch.policy_yaml import (
    Document,
    Path_,
    check_plain,
    mapping_document,
    read_document,
)
from phyai.dispatch.types import Fallback, Profile

if TYPE_CHECKING:
    from phyai_quant.plan import QuantPlan

_KEYS = ("schema", "profile", "defaults", "rules", "overrides", "quantization")
_SCHEMAS = ("phyai.kernel/v1", "v1", "1")


def load_policy(path: str | Path, *, catalog: Catalog | None = None) -> Policy:
    """Loads a policy file.

    Args:
        path: YAML file, ``~`` expanded.
        catalog: rows that rules may name; None builds the default catalog.

    Raises:
        PolicyError: if it cannot be read or is malformed; the text starts with ``file:line``.
    """
    return _policy(read_document(path), catalog)


def policy_from_mapping(
    data: Mapping[str, Any] | None, *, catalog: Catalog | None = None, source: str = ""
) -> Policy:
    """Makes a policy from plain data with the keys of a policy file.

    Args:
        data: the policy; None or an empty mapping is the empty policy.
        catalog: rows that rules may name; None builds the default catalog.
        source: where the data came from, for error texts.

    Raises:
        PolicyError: if it is malformed.
    """
    return _policy(mapping_document(data, source), catalog)


def _policy(document: Document, catalog: Catalog | None) -> Policy:
    data = document.data = check_plain(document, {} if document.data is None else document.data)
    if not isinstance(data, Mapping):
        document.fail((), f"a policy is a mapping, got {type(data).__name__}")
    for key in data:
        if key not in _KEYS:
            document.fail(
                (key,), f"unknown key {key!r}{suggest_name(key, _KEYS)} (allowed: {_list(_KEYS)})"
            )
    schema = data.get("schema", _SCHEMAS[0])
    if isinstance(schema, bool) or str(schema).strip().lower() not in _SCHEMAS:
        hint = suggest_name(str(schema), _SCHEMAS)
        document.fail(
            ("schema",), f"unsupported schema {schema!r}{hint} (allowed: {_list(_SCHEMAS)})"
        )
    parser = RuleParser(document, catalog if catalog is not None else build_catalog())
    return Policy(
        profile=_profile(document, data.get("profile")),
        fallback=_fallback(document, data.get("defaults"), parser),
        rules=parser.parse("rules"),
        overrides=parser.parse("overrides"),
        quant_plan=_quant_plan(document, data.get("quantization")),
        source=document.source,
    )


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _profile(document: Document, value: Any) -> Profile:
    if value is None:
        return Profile.STATIC
    if isinstance(value, str) and value.strip().lower() in set(Profile):
        return Profile(value.strip().lower())
    hint = suggest_name(str(value), map(str, Profile))
    raise document.error(("profile",), f"must be one of {', '.join(Profile)}, got {value!r}{hint}")


def _fallback(document: Document, defaults: Any, parser: RuleParser) -> Fallback:
    if defaults is None:
        return Fallback.REFERENCE
    if not isinstance(defaults, Mapping):
        document.fail(("defaults",), f"must be a mapping, got {defaults!r}")
    for key in defaults:
        if key != "fallback":
            hint = suggest_name(key, ["fallback"])
            document.fail(("defaults", key), f"unknown key {key!r}{hint} (allowed: fallback)")
    parsed = parser.fallback(defaults.get("fallback"), ("defaults", "fallback"))
    return parsed or Fallback.REFERENCE


def _quant_plan(document: Document, section: Any) -> "QuantPlan | None":
    if section is None:
        return None
    if not isinstance(section, Mapping):
        document.fail(("quantization",), f"must be a mapping, got {section!r}")
    from phyai_quant.policy_section import parse_quantization_section
    from phyai_quant.scheme import QuantConfigError

    paths: list[Path_] = []

    def line_of(path: Path_) -> int | None:
        paths.append(path if path[:1] == ("quantization",) else ("quantization", *path))
        return None

    try:
        return parse_quantization_section(section, line_of=line_of)
    except QuantConfigError as error:
        path = paths[-1] if paths else ("quantization",)
        text = str(error) + _nearest(document.value(path), str(error))
        line = document.line(path)
        raise PolicyError(text, source=document.source, line=line) from error


def _nearest(value: Any, message: str) -> str:
    """Returns the suggestion for a misspelt word, from the words that the message allows."""
    _, found, allowed = message.partition("is not allowed; allowed: ")
    return suggest_name(value, allowed.split(", ")) if found and isinstance(value, str) else ""
