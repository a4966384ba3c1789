"""The JSON Schema of a policy file, for editors and for checks without this package.

It is made from a catalog: operations, ids and facts are enumerated where the set is closed. It
accepts canonical spellings only, so that completion offers one name per thing; the loader also
folds the case of ids. What a schema cannot say (duplicate ids, colliding rules, combinations of
weight and input that nothing runs) is left to the loader.
"""

from typing import Any

from phyai.dispatch.catalog import Catalog, build_catalog
from phyai.dispatch.policy_schema_match import match_definitions
from phyai.dispatch.policy_schema_quantization import quantization_definitions
from phyai.dispatch.types import Fallback, Profile

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


def policy_schema(catalog: Catalog | None = None) -> Schema:
    """Returns the JSON Schema (draft 2020-12) of ``phyai.kernel/v1``.

    Args:
        catalog: operations and rows that a policy may name; None builds the default catalog.
    """
    catalog = catalog if catalog is not None else build_catalog()
    return {
        "$schema": DIALECT,
        "title": "PhyAI kernel policy (phyai.kernel/v1)",
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {
            "schema": {
                "enum": ["phyai.kernel/v1", "v1", "1", 1],
                "description": "Format of this file.",
            },
            "profile": {
                "enum": [*(str(profile) for profile in Profile), None],
                "description": "static: rank rows by priority. autotune: measure them.",
            },
            "defaults": {
                "type": ["object", "null"],
                "additionalProperties": False,
                "properties": {"fallback": {"$ref": "#/$defs/fallback"}},
            },
            "rules": _list_of("rule", "Soft rules: rows in order of preference."),
            "overrides": _list_of("override", "Strict rules: the named rows, or an error."),
            "quantization": {"$ref": "#/$defs/quantization"},
        },
        "$defs": {
            "fallback": {
                "enum": [*(str(fallback) for fallback in Fallback), None],
                "description": "Whether reference rows may stand in for rows that cannot run.",
            },
            **_row_definitions(catalog),
            **_rule_definitions(),
            **match_definitions(catalog),
            **quantization_definitions(),
        },
    }


def _list_of(definition: str, description: str) -> Schema:
    return {
        "type": ["array", "null"],
        "items": {"$ref": f"#/$defs/{definition}"},
        "description": description,
    }


def _row_definitions(catalog: Catalog) -> Schema:
    ids = sorted(catalog.match_ids("*"))
    return {
        "kernel_id": {"enum": ids},
        "kernel_pattern": {
            "description": "A row id, or a pattern over ids such as flashinfer.*.",
            "anyOf": [{"enum": ids}, {"type": "string", "pattern": r"[*?\[]"}],
        },
        "params": {
            "type": ["object", "null"],
            "description": "Options of the named rows.",
            "propertyNames": {
                "enum": sorted({name for row in ids for name in catalog.impl(row).accepts})
            },
        },
    }


def _rule_definitions() -> Schema:
    common: Schema = {
        "id": {
            "type": "string",
            "pattern": r"\S",
            "description": "Name in traces; unique in the file.",
        },
        "priority": {
            "type": "integer",
            "description": "Higher wins. Rules of one priority must not collide.",
        },
        "match": {"anyOf": [{"$ref": "#/$defs/match"}, {"type": "null"}]},
        "params": {"$ref": "#/$defs/params"},
    }
    pattern = _optional("kernel_pattern")
    prefer: Schema = {
        "description": "A row id, or ids in order of preference.",
        "anyOf": [
            {"$ref": "#/$defs/kernel_id"},
            {
                "type": "array",
                "minItems": 1,
                "uniqueItems": True,
                "items": {"$ref": "#/$defs/kernel_id"},
            },
            {"type": "null"},
        ],
    }
    fallback = {"$ref": "#/$defs/fallback"}
    rule = {**common, "prefer": prefer, "restrict_to": pattern, "fallback": fallback}
    override = {**common, "use": _optional("kernel_id"), "restrict_to": pattern}
    return {
        "rule": _entry(rule, ("prefer", "restrict_to")),
        "override": _entry(override, ("use", "restrict_to")),
    }


def _optional(definition: str) -> Schema:
    return {"anyOf": [{"$ref": f"#/$defs/{definition}"}, {"type": "null"}]}


def _entry(properties: Schema, choices: tuple[str, str]) -> Schema:
    stated: list[Schema] = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in choices
    ]
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "oneOf": stated,
    }
