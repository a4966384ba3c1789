"""Plans as JSON or YAML files that read back equal."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from phyai_quant.importers.base import Section
from phyai_quant.plan import QuantPlan
from phyai_quant.rules import Matcher, MatcherKind, Rule
from phyai_quant.scheme import QuantConfigError, QuantScheme, TensorQuant
from phyai_quant.strict_json import parse_json

VERSION = "phyai.quant-plan/v1"
"""Value of ``version`` in a plan file."""

_PLAN_KEYS = ("version", "source", "rules", "default", "kv_cache")
_RULE_KEYS = ("match", "scheme", "source")
_SCHEME_KEYS = ("weight", "input", "online", "stored_by")
_TENSOR_FIELDS = {field.name: field for field in fields(TensorQuant)}
_YAML_SUFFIXES = (".yaml", ".yml")


def plan_to_dict(plan: QuantPlan) -> dict[str, Any]:
    """Returns a JSON-able mapping of the whole plan, with the sources of its rules."""
    data = plan.as_dict()
    rules = [
        {**entry, "source": rule.source}
        for entry, rule in zip(data["rules"], plan.rules, strict=True)
    ]
    return {"version": VERSION, "source": plan.source, **data, "rules": rules}


def plan_from_dict(data: Any, *, source: str = "plan") -> QuantPlan:
    """Returns the plan of a mapping that `plan_to_dict` made.

    Args:
        data: The mapping; fields of schemes that are left out take their defaults.
        source: Name of the file, for messages.

    Raises:
        QuantConfigError: A key or value outside the format; the text gives file and key path.
    """
    if not isinstance(data, Mapping):
        raise QuantConfigError(f"{source}: expected a mapping, got {type(data).__name__}")
    root = Section(data, source)
    root.require_known(_PLAN_KEYS)
    if root.string("version") != VERSION:
        root.fail(f"{data.get('version')!r} is not allowed; allowed: {VERSION}", "version")
    rules = [] if data.get("rules") is None else data["rules"]
    if not isinstance(rules, list):
        root.fail(f"expected a list, got {rules!r}", "rules")
    entries = Section({f"rules[{index}]": rule for index, rule in enumerate(rules)}, source)
    return QuantPlan(
        rules=tuple(_rule(entries.section(name)) for name in entries.data),
        default=_scheme(root, "default"),
        kv_cache=_tensor(root, "kv_cache"),
        source=root.string("source") or "",
    )


def dump_plan(plan: QuantPlan, file: str | Path | None = None, *, form: str | None = None) -> str:
    """Returns the plan as text and writes it to ``file``, if one is given.

    Args:
        plan: The plan.
        file: Where to write.
        form: ``"json"`` or ``"yaml"``; by default what the file's suffix says, else JSON.

    Raises:
        QuantConfigError: Another form, or YAML without the ruamel.yaml package.
    """
    if form is None:
        form = "yaml" if file is not None and Path(file).suffix in _YAML_SUFFIXES else "json"
    if form not in ("json", "yaml"):
        raise QuantConfigError(f"form {form!r} is not supported; allowed: json, yaml")
    data = plan_to_dict(plan)
    text = _dump_yaml(data) if form == "yaml" else json.dumps(data, indent=2) + "\n"
    if file is not None:
        Path(file).write_text(text, encoding="utf-8")
    return text


def load_plan(file: str | Path) -> QuantPlan:
    """Reads a plan file: YAML when its suffix says so, else JSON.

    Raises:
        QuantConfigError: The file cannot be read, is not valid, or holds no plan.
    """
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QuantConfigError(f"{path}: cannot be read: {error}") from error
    read = _load_yaml if path.suffix in _YAML_SUFFIXES else parse_json
    return plan_from_dict(read(text, str(path)), source=str(path))


def _rule(section: Section) -> Rule:
    section.require_known(_RULE_KEYS)
    match = section.section("match")
    kinds = tuple(kind.value for kind in MatcherKind)
    match.require_known(kinds)
    if len(match.data) != 1:
        section.fail(f"give exactly one of {', '.join(kinds)}", "match")
    (kind, pattern), *_ = match.data.items()
    if "scheme" not in section.data:
        section.fail("required key is missing; give a scheme, or null for unquantized", "scheme")
    matcher = _guard(match, kind, lambda: Matcher(MatcherKind(kind), pattern))
    return Rule(matcher, _scheme(section, "scheme"), section.string("source") or "")


def _scheme(parent: Section, key: str) -> QuantScheme | None:
    if not parent.has(key):
        return None
    section = parent.section(key)
    section.require_known(_SCHEME_KEYS)
    weight = _tensor(section, "weight")
    if weight is None:
        section.fail("required key is missing", "weight")
    return QuantScheme(
        weight,
        _tensor(section, "input"),
        section.boolean("online", default=False),
        section.string("stored_by"),
    )


def _tensor(parent: Section, key: str) -> TensorQuant | None:
    if not parent.has(key):
        return None
    section = parent.section(key)
    section.require_known(tuple(_TENSOR_FIELDS))
    values = {name: _field(section, name) for name in section.data if section.has(name)}
    for name in ("dtype", "granularity"):
        if name not in values:
            section.fail("required key is missing", name)
    return _guard(parent, key, lambda: TensorQuant(**values))


def _field(section: Section, name: str) -> Any:
    default = _TENSOR_FIELDS[name].default
    if name == "block_shape":
        return section.block_shape(name)
    if name == "rotation_group":
        return section.integer(name)
    return section.boolean(name, default) if isinstance(default, bool) else section.string(name)


def _guard[T](section: Section, key: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except QuantConfigError as error:
        section.fail(str(error), key)


def _yaml(kind: str) -> Any:
    try:
        from ruamel.yaml import YAML
    except ModuleNotFoundError as error:
        raise QuantConfigError(
            "YAML plans need the ruamel.yaml package; install it or use JSON"
        ) from error
    return YAML(typ=kind, pure=True)


def _dump_yaml(data: Any) -> str:
    from io import StringIO

    stream = StringIO()
    _yaml("rt").dump(data, stream)  # keeps the order of keys
    return stream.getvalue()


def _load_yaml(text: str, source: str) -> Any:
    reader = _yaml("safe")
    from ruamel.yaml.error import YAMLError

    try:
        return reader.load(text)
    except (YAMLError, ValueError, RecursionError) as error:
        raise QuantConfigError(f"{source}: not a valid YAML file: {error}") from error
