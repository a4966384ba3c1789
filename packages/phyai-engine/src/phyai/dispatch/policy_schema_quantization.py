"""The part of the policy's JSON Schema that describes ``quantization``."""

from typing import Any

from phyai_quant.online_rules import INPUT_DTYPES, MICRO_BLOCKS, WEIGHT_DTYPES
from phyai_quant.rules import MatcherKind
from phyai_quant.scheme import ROTATION_GROUPS, Granularity

Schema = dict[str, Any]

_SCHEME = "scheme"


def quantization_definitions() -> Schema:
    """Returns the definitions of the section, its rules, schemes and tensors."""
    weights = [dtype.value for dtype in WEIGHT_DTYPES]
    return {
        "quantization": {
            "type": ["object", "null"],
            "description": "Which layers are quantized while the weights load.",
            "additionalProperties": False,
            "properties": {
                "method": {"const": "rtn", "description": "Round to nearest."},
                "stage": {"const": "load", "description": "While the weights load."},
                "default": {"anyOf": [_scheme_of({}), {"type": "null"}]},
                "rules": {
                    "type": "array",
                    "description": "The first rule that matches a layer decides.",
                    "items": {"$ref": "#/$defs/quantization_rule"},
                },
            },
        },
        "quantization_rule": {"required": ["match"], **_scheme_of(_rule_fields())},
        "quantized_weight": _tensor(weights, is_input=False),
        "quantized_input": _tensor([dtype.value for dtype in INPUT_DTYPES], is_input=True),
    }


def _rule_fields() -> Schema:
    kinds = {kind.value: {"type": "string", "minLength": 1} for kind in MatcherKind}
    return {
        "id": {"type": ["string", "null"], "minLength": 1},
        "match": {
            "type": "object",
            "description": "Layers by construction name or class.",
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
            "properties": kinds,
        },
    }


def _scheme_of(fields: Schema) -> Schema:
    """Returns the schema of a mapping with ``fields`` and either a weight or ``scheme: null``."""
    quantized: Schema = {"required": ["weight"], "properties": {_SCHEME: False}}
    absent = dict.fromkeys(("weight", "input", "stored_by"), False)
    kept: Schema = {"required": [_SCHEME], "properties": absent}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **fields,
            _SCHEME: {"type": "null", "description": "Keep the layer unquantized."},
            "weight": {"$ref": "#/$defs/quantized_weight"},
            "input": {"anyOf": [{"$ref": "#/$defs/quantized_input"}, {"type": "null"}]},
            "stored_by": {
                "type": ["string", "null"],
                "description": "A weight format by name, such as fp8_rows.",
                "minLength": 1,
            },
        },
        "oneOf": [quantized, kept],
    }


def _tensor(dtypes: list[str], *, is_input: bool) -> Schema:
    size = {"type": "integer", "minimum": 1}
    micro = {"enum": [dtype.value for dtype in MICRO_BLOCKS]}
    blocks = "One scale per token is per_channel." if is_input else "[1, 128] is a group along K."
    properties: Schema = {
        "dtype": {"enum": dtypes},
        "granularity": {"enum": [item.value for item in Granularity]},
        "block_shape": {
            "type": ["array", "null"],
            "description": f"[N block, K block]. {blocks}",
            "minItems": 2,
            "maxItems": 2,
            "items": size,
        },
        "symmetric": {"const": True},
        "dynamic": {"const": is_input},
        "micro_scaled": {"type": "boolean"},
        "rotation_group": {"type": "null"} if is_input else {"enum": [*ROTATION_GROUPS, None]},
    }
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["dtype"],
        "properties": properties,
        "if": {"required": ["dtype"], "properties": {"dtype": micro}},
        "then": {"properties": {"micro_scaled": {"const": True}}},
        "else": {"properties": {"micro_scaled": {"const": False}}},
    }
