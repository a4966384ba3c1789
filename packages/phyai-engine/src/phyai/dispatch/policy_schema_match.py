"""The part of the policy's JSON Schema that describes ``match``."""

from collections.abc import Mapping
from typing import Any

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.facts import GLOBAL_FACTS, NAMESPACES, OP_SCOPED_PREFIXES, FactKind
from phyai.dispatch.matcher import CLOSED_VALUES

Schema = dict[str, Any]

_PLAIN = r"^[^*?\[]*$"
_INTEGER_TEXT = r"^\s*((<=|>=|==|!=|<|>)\s*[+-]?\d+|%\s*0*[1-9]\d*\s*(==\s*\d+)?)\s*$"
_ARCH = r"^(sm[0-9]{2,3}[a-z]?|gfx[0-9][0-9a-f]{2,})$"
_ARCH_BOUND = r"^>=\s*sm[0-9]{2,3}[a-z]?$"
_BOOL_WORDS = ["true", "false", "yes", "no", "on", "off", "0", "1", 0, 1]
_COMBINATORS = ("all_of", "any_of", "none_of")


def match_definitions(catalog: Catalog) -> Schema:
    """Returns the definitions of matchers, conditions and the facts of each operation.

    Args:
        catalog: operations and their facts.
    """
    paths = _paths(catalog)
    return {
        "match": {
            "type": "object",
            "description": "Conditions that must all hold; empty matches every call.",
            "properties": {
                **{path: _on(path, kind) for path, kind in sorted(paths.items())},
                "op": _operation(catalog),
                **{name: _namespace(name, paths) for name in NAMESPACES},
                **{name: {"$ref": "#/$defs/matchers"} for name in _COMBINATORS},
                "quant.fields": {"$ref": "#/$defs/fields"},
                "when": {"$ref": "#/$defs/implication"},
            },
            "patternProperties": {
                r"^lib\..": _condition(FactKind.BOOL),
                r"^quant\.fields\..": _condition(FactKind.ANY),
            },
            "additionalProperties": False,
            "allOf": [_facts_of(op, catalog, paths) for op in catalog.ops()],
        },
        "matchers": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/match"}},
        "fields": {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": _condition(FactKind.ANY),
        },
        "implication": {
            "type": "object",
            "additionalProperties": False,
            "required": ["if", "then"],
            "properties": {"if": {"$ref": "#/$defs/match"}, "then": {"$ref": "#/$defs/match"}},
        },
        **{f"condition_{kind}": _values(kind) for kind in FactKind},
        **{f"condition_{path}": _any_of(*_closed(path)) for path in CLOSED_VALUES},
    }


def _paths(catalog: Catalog) -> dict[str, FactKind | None]:
    """Returns every fact path; the kind is None where operations declare different ones."""
    paths: dict[str, FactKind | None] = {**GLOBAL_FACTS}
    for op in catalog.ops():
        for path, kind in catalog.entry(op).kinds.items():
            paths[path] = kind if paths.get(path, kind) is kind else None
    return paths


def _condition(kind: FactKind | None) -> Schema:
    return {"$ref": f"#/$defs/condition_{kind or FactKind.ANY}"}


def _on(path: str, kind: FactKind | None) -> Schema:
    return {"$ref": f"#/$defs/condition_{path}"} if path in CLOSED_VALUES else _condition(kind)


def _closed(path: str) -> tuple[Schema, Schema]:
    values = CLOSED_VALUES[path]
    return {"enum": [*values]}, {"enum": [*values, None]}


def _operation(catalog: Catalog) -> Schema:
    names: Schema = {"enum": [*catalog.ops()]}
    listed: Schema = {"type": "array", "minItems": 1, "items": names}
    return {"description": "Operation.", "anyOf": [names, listed, {"type": "null"}]}


def _namespace(name: str, paths: Mapping[str, FactKind | None]) -> Schema:
    """Returns the schema of a mapping that stands for a prefix, such as ``shape: {M: 4}``."""
    prefix = f"{name}."
    inside = {
        path.removeprefix(prefix): _on(path, kind)
        for path, kind in sorted(paths.items())
        if path.startswith(prefix)
    }
    schema: Schema = {"type": "object", "minProperties": 1, "properties": inside}
    if name == "quant":
        schema["properties"]["fields"] = {"$ref": "#/$defs/fields"}
        schema["patternProperties"] = {r"^fields\..": _condition(FactKind.ANY)}
    schema["additionalProperties"] = _condition(FactKind.BOOL) if name == "lib" else False
    return schema


def _facts_of(op: str, catalog: Catalog, paths: Mapping[str, FactKind | None]) -> Schema:
    """Returns the rule that a matcher of one operation names only facts of that operation."""
    kinds = catalog.entry(op).kinds
    scoped = [path for path in sorted(paths) if path.startswith(OP_SCOPED_PREFIXES)]
    foreign: Schema = {path: False for path in scoped if path not in kinds}
    known: Schema = {path: _condition(kinds[path]) for path in scoped if path in kinds}
    for prefix in OP_SCOPED_PREFIXES:
        names = sorted(path.removeprefix(prefix) for path in kinds if path.startswith(prefix))
        known[prefix.removesuffix(".")] = {"propertyNames": {"enum": names}}
    return {
        "if": {"required": ["op"], "properties": {"op": {"const": op}}},
        "then": {"properties": {**foreign, **known}},
    }


def _values(kind: FactKind) -> Schema:
    """Returns the values that a condition on a fact of one kind takes."""
    null: Schema = {"type": "null"}
    if kind is FactKind.INT:
        listed = {"type": ["integer", "null"]}
        return _any_of({"type": "integer"}, {"type": "string", "pattern": _INTEGER_TEXT}, listed)
    if kind is FactKind.ARCH:
        arch: Schema = {"type": "string", "pattern": _ARCH}
        bound: Schema = {"type": "string", "pattern": _ARCH_BOUND}
        return _any_of(arch, bound, {"anyOf": [arch, null]})
    if kind is FactKind.BOOL:
        flag: Schema = {"anyOf": [{"type": "boolean"}, {"enum": _BOOL_WORDS}]}
        return _any_of(flag, {"anyOf": [flag, null]})
    text: Schema = {"type": "string", "pattern": _PLAIN}
    if kind is FactKind.STRSET:
        return _any_of(text, text)
    if kind is FactKind.ANY:
        plain: Schema = {"anyOf": [text, {"type": ["number", "boolean"]}]}
        return _any_of(plain, {"anyOf": [plain, null]})
    return _any_of(text, {"anyOf": [text, null]})


def _any_of(*forms: Schema) -> Schema:
    """Returns the forms of a condition; the last one is that of the items of a list."""
    *single, item = forms
    listed = {"type": "array", "minItems": 1, "items": item}
    return {"anyOf": [*single, listed, {"type": "null"}]}
